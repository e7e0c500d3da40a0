"""metrics.jsonl: the one record of a run's numbers; every other sink copies it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from polarlm.data.atomic import explained, write_beside
from polarlm.runs.files import json_lines
from polarlm.training.loggers.sink import Sink


class JsonLines(Sink):
    """metrics.jsonl: one object per logging step, append-only; the truth that every other sink copies."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    name = "metrics"

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append one row; numbers that JSON does not know (nan, inf) are written as null."""
        row = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in metrics.items()}
        text = json.dumps(row) + "\n"
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

    def rows(self) -> list[dict[str, Any]]:
        """All rows written so far, without damaged ones."""
        return json_lines(self.path)
