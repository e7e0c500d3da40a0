"""Times that can be divided by each other: every candidate takes its turn in every round, medians over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(candidates: dict[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, float]:
    """Median seconds per call of each candidate; the machine's mood hits all of them alike."""
    return {name: statistics.median(times) for name, times in turns(candidates, rounds, warmup).items()}


def turns(
    candidates: dict[str, Callable[[], None]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call, round by round; `time.process_time` does not count what other programs take."""
    spent: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        for name, run in candidates.items():
            began = clock()
            run()
            if turn >= warmup:
                spent[name].append(clock() - began)
    return spent


def ratios(spent: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Each candidate relative to `base`: of the medians, of the minima, and the median of the ratios in a round."""
    return {
        name: {
            "ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(times) / statistics.median(spent[base]),
            "of minima": min(times) / min(spent[base]),
            "in a round": statistics.median(mine / other for mine, other in zip(times, spent[base])),
        }
        for name, times in spent.items()
    }


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
