"""The engine: runs a list of jobs, N at a time here or on a cluster.

A finished job is not run again, one that another process is running is waited for, an interrupted one resumes. Live
table, time left, logs, retries and fail-fast are the same for sweeps, trials, searches and studies.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polarlm.errors import JobsLeft
from polarlm.jobs.job import FAILED, FINISHED, STOPPED, Ended, JobSpec, outcome_of, reuse_finished
from polarlm.printing import clock, visible_text
from polarlm.runs.identity import folder_of_run
from polarlm.runs.lock import is_locked

POLL = 0.2  # seconds between two looks at the running jobs


class Handle(Protocol):
    """A job that has been started, here or elsewhere."""

    seconds: float | None  # that its process took, where it is known to differ from the time since its start

    def poll(self) -> int | None:
        """The exit code, or None while it is running."""

    def stop(self) -> None:
        """Let it save its state, then end it with all its processes."""


class Place(Protocol):
    """Where jobs run."""

    at_once: int
    outlives: bool  # jobs go on when this process ends
    waits: bool  # for its jobs; False: leave them to the cluster

    def start(self, jobs: Sequence[JobSpec]) -> list[Handle]:
        """Start these jobs."""

    def find(self, job: JobSpec) -> Handle | None:
        """The handle of a job that an earlier process started here and that still runs."""


@dataclass(frozen=True)
class Policy:
    """What to do about failures (`jobs` in train.yaml)."""

    stop_on_failure: bool = False
    retries: int = 0  # of a job that crashed or was killed; a wrong setting is not tried again


@dataclass
class Running:
    """A job that has been started."""

    job: JobSpec
    handle: Handle
    started: float


class Elsewhere:
    """The handle of a job whose run folder another process is writing."""

    seconds: float | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def poll(self) -> int | None:
        """None while the other process holds the folder."""
        return None if is_locked(self.folder) else 1

    def stop(self) -> None:
        """It is not ours to stop."""


def run_jobs(
    jobs: Sequence[JobSpec],
    place: Place,
    *,
    policy: Policy | None = None,
    deadline: float | None = None,
    board: Board | None = None,
    on_end: Callable[[JobSpec, Ended], None] | None = None,
    refill: Callable[[], Sequence[JobSpec]] | None = None,
    watch: Callable[[JobSpec], bool] | None = None,
) -> dict[str, Ended]:
    """Run every job; returns key → how it ended. A failed job does not stop the others unless `policy` says so.

    At the `deadline` (of time.monotonic) running jobs save their state and stop, and have no entry. `refill` names all
    jobs known after one has ended, most urgent first; those not started yet are waiting. A job for which `watch`
    returns True is stopped. A `board` that is given counts these jobs among more.
    """
    policy, waiting = policy or Policy(), list({job.key: job for job in jobs}.values())
    counted = board or Board(len(waiting), place.at_once)
    running, begun = list[Running](), set[str]()
    ended: dict[str, Ended] = {}
    attempts: dict[str, int] = {}

    def end(job: JobSpec, how: Ended) -> None:
        ended[job.key] = how
        counted.ended(job, how)
        if on_end:
            on_end(job, how)

    with counted:
        try:
            while waiting or running:
                if deadline is not None and time.monotonic() > deadline:
                    return ended
                if policy.stop_on_failure and any(how.status == FAILED for how in ended.values()):
                    for one in running:
                        one.handle.stop()
                    running.clear()
                    return ended
                before = len(ended)
                free = [job for job in waiting[: max(0, place.at_once - len(running))]]
                waiting = waiting[len(free) :]
                begun |= {job.key for job in free}
                running += _begin(free, place, counted, end)
                if running and not place.waits:
                    raise JobsLeft
                time.sleep(POLL if running else 0)
                for one in list(running):
                    code = one.handle.poll()
                    if code is None and watch and watch(one.job):
                        one.handle.stop()
                        running.remove(one)
                        end(one.job, Ended(STOPPED, seconds=_duration(one)))
                    if code is None:
                        continue
                    running.remove(one)
                    if isinstance(one.handle, Elsewhere):  # finished by the other process, or ours to resume
                        how = reuse_finished(one.job)
                        counted.forget(one.job)
                        if how is None:
                            waiting.insert(0, one.job)
                            continue
                    else:
                        how = outcome_of(one.job, code, _duration(one))
                    tried = attempts[one.job.key] = attempts.get(one.job.key, 0) + 1
                    if how.status == FAILED and how.code != 2 and tried <= policy.retries:
                        counted.retry(one.job, how)
                        waiting.insert(0, one.job)
                    else:
                        end(one.job, how)
                if len(ended) > before and refill:
                    again = {job.key for job in waiting} & begun
                    waiting = [job for job in refill() if job.key not in begun or job.key in again]
                    counted.total = len(begun) + sum(job.key not in begun for job in waiting)
                counted.refresh()
        except KeyboardInterrupt:
            if place.outlives and running:
                raise JobsLeft from None
            raise
        finally:  # Ctrl-C or the deadline: no job outlives its engine, unless it runs on a cluster
            for one in running if not place.outlives else ():
                one.handle.stop()
    return ended


def _begin(jobs: Sequence[JobSpec], place: Place, board: Board, end: Callable[[JobSpec, Ended], None]) -> list[Running]:
    """Start these jobs, except those that are finished or that somebody is running already."""
    running, fresh = [], []
    for job in jobs:
        if (how := reuse_finished(job)) is not None:
            end(job, how)
            continue
        folder = folder_of_run(job.runs_dir, job.identity) if job.identity and job.verb == "train" else None
        handle = place.find(job) or (Elsewhere(folder) if folder and is_locked(folder) else None)
        if handle is None:
            fresh.append(job)
        else:
            board.started(job, "running already")
            running.append(Running(job, handle, time.monotonic()))
    for job in fresh:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.result.unlink(missing_ok=True)
    for job, handle in zip(fresh, place.start(fresh) if fresh else ()):
        board.started(job)
        running.append(Running(job, handle, time.monotonic()))
    return running


def _duration(one: Running) -> float:
    return one.handle.seconds if one.handle.seconds is not None else time.monotonic() - one.started


# -- how the jobs are doing: a live table on a terminal, one line per event elsewhere ---------------------------------


class Board:
    """Counts jobs and tells about them on stderr; with `rank` also the best loss so far."""

    def __init__(self, total: int, at_once: int, rank: bool = True) -> None:
        self.total, self.at_once = total, at_once
        self.rank = rank  # losses of jobs on different texts have no best
        self.running: dict[str, tuple[JobSpec, float]] = {}
        self.numbers: dict[str, int] = {}  # of the jobs, in the order they were begun
        self.counts: dict[str, int] = {}  # of each way to end
        self.durations: list[float] = []  # of the jobs that were trained
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
        if self.live is None:
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
