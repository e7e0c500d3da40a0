"""Times that can be divided by each other: every candidate takes its turn in every round, medians over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(candidates: dict[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, float]:
    """Median seconds per call of each candidate; the machine's mood hits all of them alike."""
    spent: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            run()
            if turn >= warmup:
                spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in spent.items()}


def table(rows: list[dict], columns: list[str]) -> str:
    """Rows as a plain text table."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def _cell(value) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
