"""How a sweep is doing: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from polarlm.training.loggers.short_numbers import clock


class Board:
    """Counts jobs and tells about them on stderr."""

    def __init__(self, total: int, at_once: int, rank: bool = True) -> None:
        self.total, self.at_once = total, at_once
        self.rank = rank  # losses of jobs on different texts have no best
        self.running: dict[int, tuple[str, float]] = {}
        self.done = self.failed = 0
        self.spent: list[float] = []
        self.best: tuple[float, str] | None = None
        self.live: Any = None

    def __enter__(self) -> Board:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=2)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    def started(self, number: int, name: str, log: Path) -> None:
        """A job has begun."""
        self.running[number] = name, time.monotonic()
        self.say(f"job {number + 1}/{self.total} started: {name} (log: {log})")

    def ended(self, number: int, result: JobReturn, seconds: float) -> None:
        """A job has ended, well or badly."""
        name, _ = self.running.pop(number)
        self.spent.append(seconds)
        if result.status == JobStatus.COMPLETED:
            self.done += 1
            outcome = "finished"
            if result.return_value is not None:  # an evaluation has no loss of its own
                loss = float(result.return_value)
                if self.rank and (self.best is None or loss < self.best[0]):
                    self.best = loss, name
                outcome = f"finished, val loss {loss:.4f}"
        else:
            self.failed += 1
            outcome = f"failed: {result._return_value}"
        left = self.total - self.done - self.failed
        more = f"; {left} to go, about {clock(self.seconds_left())}" if left else ""
        line = f"job {number + 1}/{self.total} {outcome} ({clock(seconds)}){more}"
        self.say(line)
        if self.live is not None and result.status != JobStatus.COMPLETED:  # stays above the table
            self.live.console.print(f"{name}: {line}", markup=False, highlight=False)

    def seconds_left(self) -> float:
        """Expected time until the last job ends, from the jobs that have ended."""
        left = self.total - self.done - self.failed
        return (
            left * sum(self.spent) / len(self.spent) / min(self.at_once, max(left, 1)) if self.spent else float("nan")
        )

    def say(self, line: str) -> None:
        """One line for logs and quiet terminals."""
        if self.live is None:
            print(line, file=sys.stderr, flush=True)

    def refresh(self) -> None:
        """Redraw the table."""
        if self.live is None:
            return
        from rich.table import Table

        waiting = self.total - self.done - self.failed - len(self.running)
        title = f"{self.done} finished, {self.failed} failed, {len(self.running)} running, {waiting} waiting"
        table = Table(title=title, min_width=len(title) + 2)  # a title is broken where the table ends
        table.add_column("job")
        table.add_column("settings")
        table.add_column("time", justify="right")
        for number, (name, since) in self.running.items():
            table.add_row(f"{number + 1}/{self.total}", name, clock(time.monotonic() - since))
        best = f"best so far: {self.best[0]:.4f} ({self.best[1]})" if self.best else ""
        table.caption = f"{best}   left: {clock(self.seconds_left())}"
        self.live.update(table)
