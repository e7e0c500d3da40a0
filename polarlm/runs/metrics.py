"""metrics.jsonl as columns: fast (pyarrow parses), tolerant of a torn last line, sampled when it is long."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polarlm.evaluation.metrics import METRICS

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
