"""What a run has recorded: metrics.jsonl, diagnostics/probe.jsonl, incidents.json, and evaluations/ of eval.py.

metrics.jsonl becomes columns: fast (pyarrow parses), tolerant of a torn last line, sampled when it is long.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import allowed_in_memory, explained, replacing, require_allowed
from polarlm.errors import UserError
from polarlm.evaluation.metrics import METRICS
from polarlm.runs.files import read_json, write_json

# What the report draws. Everything else in a row is skipped by the parser and costs next to nothing.
COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "processor_seconds",
    "flops",
    "tokens_per_second",
    "train/lr",
    "train/loss",
    "train/grad_norm",
    *(f"val/{metric.name}" for metric in METRICS),
)
AXES = ("step", "tokens", "flops", "seconds", "processor_seconds")
# A page draws 500 points of a curve: of longer files every k-th row is parsed, and every row that has an evaluation.
MAX_ROWS = 4_000
EVALUATION = b'"val/'


@dataclass(frozen=True)
class Metrics:
    """The columns of one metrics.jsonl; a value that a row does not have is nan."""

    columns: dict[str, np.ndarray]
    unreadable: int = 0  # lines that are no JSON objects

    def __len__(self) -> int:
        return len(self.columns["step"])

    def stream(self, *names: str) -> dict[str, np.ndarray]:
        """The rows that have any of `names`, in order of steps, with the axes; of a repeated step the last counts."""
        present = np.zeros(len(self), dtype=bool)
        for name in names:
            present |= ~np.isnan(self.columns[name])
        step = self.columns["step"]
        present &= ~np.isnan(step)
        rows = np.flatnonzero(present)
        if len(rows):
            # A later row with the same or a smaller step comes from a continued run and replaces what was before it.
            following = np.minimum.accumulate(step[rows][::-1])[::-1]
            rows = rows[np.append(step[rows][:-1] < following[1:], True)]
        return {name: self.columns[name][rows] for name in (*AXES, *names)}


def read_metrics(path: Path) -> Metrics:
    """Read a metrics.jsonl, also one that is being written or was cut off by a kill."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    torn = data[data.rfind(b"\n") + 1 :]
    if torn and not is_object(torn):
        data = data[: len(data) - len(torn)]
    data = _sample_rows(data)
    if not data.strip():
        return Metrics({name: np.empty(0) for name in COLUMNS}, unreadable=int(bool(torn)))
    import pyarrow as pa
    import pyarrow.json as reader

    schema = pa.schema([(name, pa.float64()) for name in COLUMNS])
    try:
        table = reader.read_json(
            pa.BufferReader(data),
            # One block per file: no row can straddle two blocks, and the files themselves are read in parallel.
            read_options=reader.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**30)),
            parse_options=reader.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return _read_line_by_line(data)
    return Metrics(
        {name: table[name].combine_chunks().fill_null(np.nan).to_numpy(zero_copy_only=False) for name in COLUMNS}
    )


def _sample_rows(data: bytes) -> bytes:
    lines = data.split(b"\n")
    every = -(-len(lines) // MAX_ROWS)
    if every < 2:
        return data
    kept = [line for i, line in enumerate(lines) if i % every == 0 or EVALUATION in line]
    return b"\n".join([*kept, *lines[-2:]])  # the newest row always counts; a repeated step is dropped later


def _read_line_by_line(data: bytes) -> Metrics:
    """For damaged files: keep every line that can be read and count the others."""
    rows, unreadable = [], 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append([_number(row.get(name)) for name in COLUMNS])
        except (ValueError, AttributeError, RecursionError, OverflowError):
            unreadable += 1
    values = np.asarray(rows, dtype=float).reshape(len(rows), len(COLUMNS))
    return Metrics({name: values[:, i].copy() for i, name in enumerate(COLUMNS)}, unreadable)


def is_object(line: bytes) -> bool:
    """Whether a line of a .jsonl file is whole: the last one may be being written."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else np.nan


# -- diagnostics/probe.jsonl: what the probe saw inside a run, thinned over time --------------------------------------


# What a trajectory needs; the newest probe is always among them.
MAX_PROBES = 40


@dataclass(frozen=True)
class StoredProbe:
    """One look inside a run: arrays of shape (), (layers,), (layers + 1,) or (layers, heads), and lag profiles."""

    step: float
    tokens: float
    layers: int
    values: dict[str, np.ndarray]
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_probes(path: Path, max_probes: int = MAX_PROBES) -> tuple[list[StoredProbe], int]:
    """At most `max_probes` probes in order of steps (newest included) and the number of unreadable lines."""
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return [], 0
    unreadable = 0
    if lines and not is_object(lines[-1]):  # being written, or cut off by a kill
        lines.pop()
        unreadable += 1
    if not lines:
        return [], unreadable
    probes: dict[float, StoredProbe] = {}
    for index in np.unique(np.linspace(0, len(lines) - 1, min(max_probes, len(lines))).round().astype(int)):
        try:
            probe = _parse(json.loads(lines[index]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            unreadable += 1
            continue
        probes[probe.step] = probe  # a continued run may repeat a step: the later line counts
    return [probes[step] for step in sorted(probes)], unreadable


def _parse(row: dict[str, Any]) -> StoredProbe:
    values = {name: _array(value) for name, value in row["values"].items() if value is not None}
    profiles = {}
    for name, profile in (row.get("profiles") or {}).items():
        x, y = _array(profile["x"]), _array(profile["y"])
        if y.shape[-1:] == x.shape:
            profiles[name] = {"x": x, "y": y, "xlabel": str(profile.get("xlabel", "lag"))}
    return StoredProbe(float(row["step"]), float(row["tokens"]), int(row["layers"]), values, profiles)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=float)  # None inside a list (a nan or inf that JSON does not know) becomes nan


# -- incidents.json: steps that went wrong, and what was done about them (training/incidents.py) ----------------------


FILE = "incidents.json"


def detours(folder: Path) -> list[tuple[int, int]]:
    """(after step, batches left out) of every rewind of a run, in order: which batches a step reads follows from it."""
    known = read_incidents(folder)
    try:
        return sorted((int(i["after_step"]), int(i["skipped_batches"])) for i in known if i["action"] == "rewind")
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder / FILE} is damaged; restore it from a copy") from None


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """The record of a run; a damaged one is a UserError, because which batches come next follows from it."""
    file = folder / FILE
    known = read_json(file, list)
    if known is None:
        return []
    if not all(isinstance(one, dict) and "action" in one for one in known):
        raise UserError(f"{file} is damaged; restore it from a copy")
    return known


# -- evaluations/<protocol>-<data>-<split>-<digest>.json and .npz: what eval.py found ---------------------------------


FOLDER = "evaluations"


def evaluation_stem(protocol: dict[str, Any]) -> str:
    """The file name of a protocol: the same question asked again replaces the old answer."""
    digest = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:8]
    # A stored name of a corpus must not lead into another folder.
    return re.sub(r"[^\w.+=-]", "_", f"{protocol['name']}-{protocol['data']}-{protocol['split']}") + f"-{digest}"


def write_evaluation(folder: Path, record: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> Path:
    """Write {"protocol": {…}, "numbers": {…}, …} and its arrays beside it; returns the record's path."""
    stem = folder / FOLDER / evaluation_stem(record["protocol"])
    if arrays is not None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        target, beside = stem.with_name(f"{stem.name}.npz"), stem.with_name(f".{stem.name}.tmp.npz")
        with explained(target), replacing(target, beside):
            np.savez_compressed(beside, **arrays)  # type: ignore[arg-type]
        record = {**record, "arrays": f"{stem.name}.npz"}
    path = stem.with_name(f"{stem.name}.json")
    write_json(path, record)
    return path


def read_evaluations(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """All records of a run (of one protocol), in the order of their names."""
    records = [read_json(path) for path in sorted((folder / FOLDER).glob("*.json"))]
    records = [record for record in records if isinstance(record.get("protocol"), dict)]
    return [record for record in records if name is None or record["protocol"].get("name") == name]


def read_arrays(folder: Path, record: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a record, without unpickling anything; empty when it has none."""
    if "arrays" not in record:
        return {}
    path = folder / FOLDER / Path(record["arrays"]).name
    what_to_do = f"Delete it and {path.with_suffix('.json').name}, and judge the run again."
    try:
        with np.load(path, allow_pickle=False) as arrays:
            size = sum(member.file_size for member in arrays.zip.infolist())
            require_allowed(path, size, allowed_in_memory(path), what_to_do)
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged ({error}). {what_to_do}") from None
