"""metrics.jsonl: the record of a run's numbers; every logger gets a copy."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from lightning.pytorch.utilities import rank_zero_only

from polarlm.data.atomic import explained, write_beside

# What a run writes step by step: its metrics, what the probe saw, the texts sampled during training.
RECORDS = METRICS, PROBES, SAMPLES = "metrics.jsonl", "diagnostics/probe.jsonl", "diagnostics/samples.jsonl"


class JsonLines:
    """A .jsonl file with one object per step, append-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @rank_zero_only
    def append(self, row: dict[str, Any]) -> None:
        """Append one row; numbers that JSON does not know (nan, inf) are written as null."""
        row = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in row.items()}
        text = json.dumps(row) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with explained(self.path, lambda: len(text)), open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    @rank_zero_only
    def flush(self) -> None:
        """Have every row on disk, as a checkpoint that follows will be."""
        if self.path.exists():
            with explained(self.path), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop the rows after `step` (written after the checkpoint we continue from) and a torn last line."""
        if not self.path.exists():
            return
        kept, damaged = [], 0
        lines = self.path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += number < len(lines)  # the last one was being written
        if damaged:
            print(f"warning: {self.path}: {damaged} damaged lines are left out", file=sys.stderr, flush=True)
        write_beside(self.path, b"".join(line + b"\n" for line in kept))


class RowLogger(Logger):
    """Lightning's way into metrics.jsonl: what callbacks log joins the next row instead of becoming one."""

    name, version = "metrics", ""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[str, float] = {}

    @property
    def experiment(self) -> Any:
        return DummyExperiment()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.pending |= {name: float(value) for name, value in metrics.items() if name != "epoch"}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them."""

    def take(self) -> dict[str, float]:
        """What was logged since the last row."""
        taken, self.pending = self.pending, {}
        return taken
