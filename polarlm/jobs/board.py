"""How the jobs are doing: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from polarlm.jobs.job import FINISHED, Ended, JobSpec
from polarlm.training.loggers.short_numbers import clock
from polarlm.visible import visible_text


class Board:
    """Counts jobs and tells about them on stderr."""

    def __init__(self, total: int, at_once: int, rank: bool = True, quiet: bool = False) -> None:
        self.total, self.at_once, self.quiet = total, at_once, quiet
        self.rank = rank  # losses of jobs on different texts have no best
        self.running: dict[str, tuple[JobSpec, float]] = {}
        self.numbers: dict[str, int] = {}  # of the jobs, in the order they were begun
        self.counts: dict[str, int] = {}  # of each way to end
        self.durations: list[float] = []  # of the jobs that were trained
        self.best: tuple[float, str] | None = None
        self.live: Any = None

    def __enter__(self) -> Board:
        if sys.stderr.isatty() and not self.quiet:
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=2)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    def started(self, job: JobSpec, note: str = "started") -> None:
        """A job has begun."""
        self.running[job.key] = job, time.monotonic()
        self.say(f"job {self._number(job)} {note}: {job.name} (log: {job.log})")

    def ended(self, job: JobSpec, how: Ended) -> None:
        """A job has ended, well or badly."""
        self.forget(job)
        self.counts[how.status] = self.counts.get(how.status, 0) + 1
        outcome = how.status if how.status == FINISHED or not how.error else f"{how.status}: {how.error}"
        if how.status == FINISHED:
            if not how.reused:
                self.durations.append(how.seconds)
            if how.loss is not None:  # an evaluation has no loss of its own
                if self.rank and (self.best is None or how.loss < self.best[0]):
                    self.best = how.loss, job.name
                outcome = f"{'already finished' if how.reused else 'finished'}, val loss {how.loss:.4f}"
        left = self.total - sum(self.counts.values())
        more = f"; {left} to go, {self.time_left()}" if left else ""
        line = visible_text(f"job {self._number(job)} {outcome} ({clock(how.seconds)}){more}")
        self.say(line)
        if self.live is not None and how.error:  # stays above the table
            self.live.console.print(f"{job.name}: {line}", markup=False, highlight=False)

    def retry(self, job: JobSpec, how: Ended) -> None:
        """A job has failed and is tried again."""
        self.forget(job)
        self.say(visible_text(f"job {self._number(job)} failed and is started again: {how.error}"))

    def forget(self, job: JobSpec) -> None:
        """A job is no longer running."""
        self.running.pop(job.key, None)

    def seconds_left(self) -> float | None:
        """Expected time until the last job ends, from the jobs that were trained; None before the first has finished.

        A job takes as long as those before it: the waiting ones share the slots after the running ones.
        """
        waiting = self.total - sum(self.counts.values()) - len(self.running)
        if not self.durations:
            return 0.0 if not waiting and not self.running else None
        each, now = sum(self.durations) / len(self.durations), time.monotonic()
        rest = [max(each - (now - since), 0.0) for _, since in self.running.values()]
        slots = max(1, min(self.at_once, waiting + len(rest)))
        return max((sum(rest) + waiting * each) / slots, math.ceil(waiting / slots) * each, *rest, 0.0)

    def time_left(self) -> str:
        """'about 1:20', or that nobody knows yet."""
        seconds = self.seconds_left()
        return "time left not known yet" if seconds is None else f"about {clock(seconds)}"

    def say(self, line: str) -> None:
        """One line for logs and quiet terminals."""
        if self.live is None and not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def refresh(self) -> None:
        """Redraw the table."""
        if self.live is None:
            return
        from rich.table import Table

        waiting = self.total - sum(self.counts.values()) - len(self.running)
        words = [f"{count} {status}" for status, count in self.counts.items()]
        title = ", ".join([*words, f"{len(self.running)} running", f"{waiting} waiting"])
        table = Table(title=title, min_width=len(title) + 2)  # a title is broken where the table ends
        table.add_column("job")
        table.add_column("settings")
        table.add_column("time", justify="right")
        for job, since in self.running.values():
            table.add_row(self._number(job), job.name, clock(time.monotonic() - since))
        best = f"best so far: {self.best[0]:.4f} ({self.best[1]})   " if self.best else ""
        table.caption = f"{best}left: {self.time_left()}"
        self.live.update(table)

    def _number(self, job: JobSpec) -> str:
        return f"{self.numbers.setdefault(job.key, len(self.numbers)) + 1}/{self.total}"
