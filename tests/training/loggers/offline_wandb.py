"""Reading an offline wandb run back without a server: LevelDB log framing around protobuf records."""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


@dataclass
class OfflineRun:
    """What a .wandb file holds."""

    run: object = None
    rows: list = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)  # define_metric, by name or glob
    artifacts: list = field(default_factory=list)  # (name, its files)
    exit_code: int | None = None

    @property
    def config(self):
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}


def read_offline_run(folder: Path, patience: float = 300) -> OfflineRun:
    """The finished run in an offline-run-* folder; wandb's own process writes the last records a moment later."""
    (path,) = folder.glob("run-*.wandb")
    deadline = time.monotonic() + patience
    while (run := parse(path)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return run


def parse(path: Path) -> OfflineRun:
    """What is in a .wandb file now."""
    run = OfflineRun()
    for record in records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run = record.run
        elif kind == "history":
            run.rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        elif kind == "summary":
            run.summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "artifact":
            run.artifacts.append((record.artifact.name, [entry.path for entry in record.artifact.manifest.contents]))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def records(data: bytes):
    """Every complete record; a file cut off by a kill ends where its last whole block ends."""
    assert data[:4] == b":W&B"
    position, part = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        body = data[position + 7 : position + 7 + length]
        if (kind == 0 and length == 0) or len(body) < length:
            return
        position += 7 + length
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
