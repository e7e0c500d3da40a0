"""Several jobs at a time on this machine: each its own process with its share of the threads and its own log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from polarlm.errors import UserError
from polarlm.launch.board import Board
from polarlm.launch.processes import start_job, stop_job
from polarlm.runs.files import read_json
from polarlm.runs.sweeps import RESULT_VARIABLE, SWEPT_VARIABLE


@dataclass(frozen=True)
class PoolJob:
    """What to start, what to call it, and where its output goes."""

    number: int
    overrides: list[str]
    name: str
    log: Path
    verb: str = "train"  # or eval
    swept: Sequence[str] = ()  # the keys that the sweep varies

    @property
    def result(self) -> Path:
        """Where a training job leaves the name of its finished run's folder."""
        return self.log.with_name(f".{self.log.stem}.result")


@dataclass
class Running:
    """A job that has been started."""

    job: PoolJob
    process: Any
    started: float = field(default_factory=time.monotonic)


def share_of_cores(jobs: int | None, threads: int | None) -> tuple[int, int]:
    """(jobs at a time, threads of each) for what was asked; by default one job per core."""
    cores = os.cpu_count() or 1
    at_once = jobs or max(1, cores // (threads or 1))
    return at_once, threads or max(1, cores // at_once)


def run_pool(
    jobs: Sequence[PoolJob],
    at_once: int,
    threads: int,
    *,
    deadline: float | None = None,
    rank: bool = True,
    on_end: Callable[[PoolJob, JobReturn], None] | None = None,
    refill: Callable[[], Sequence[PoolJob]] | None = None,
) -> dict[int, JobReturn]:
    """Run every job, a failed one does not stop the others; number → how it ended.

    At the `deadline` (of time.monotonic) what is running saves its state and stops, and has no entry. Without
    `rank` no job is called the best so far. `refill` names all jobs that are known after one has ended, most urgent
    first: what has not been started of them is what is waiting.
    """
    waiting, running, begun = list(jobs), list[Running](), set[int]()
    returns: dict[int, JobReturn] = {}
    with Board(len(waiting), at_once, rank) as board:
        try:
            while waiting or running:
                if deadline is not None and time.monotonic() > deadline:
                    return returns
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    begun.add(job.number)
                    running.append(Running(job, _start(job, threads)))
                    board.started(job.number, job.name, job.log)
                time.sleep(0.2)
                over = [one for one in running if one.process.poll() is not None]
                for one in over:
                    running.remove(one)
                    returns[one.job.number] = how_it_ended(one.job, one.process.returncode)
                    board.ended(one.job.number, returns[one.job.number], time.monotonic() - one.started)
                    if on_end:
                        on_end(one.job, returns[one.job.number])
                if over and refill:
                    waiting = [job for job in refill() if job.number not in begun]
                    board.total = len(begun) + len(waiting)
                board.refresh()
        finally:  # Ctrl-C or the deadline: no job outlives its pool
            for one in running:
                stop_job(one.process)
    return returns


def _start(job: PoolJob, threads: int) -> Any:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.result.unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        SWEPT_VARIABLE: " ".join(job.swept),
        RESULT_VARIABLE: str(job.result.resolve()),
    }
    return start_job(job.overrides, environment, job.log, job.verb)


def how_it_ended(job: PoolJob, code: int) -> JobReturn:
    """Its validation loss (None after an evaluation), or what its log says about the failure."""
    done = JobReturn(overrides=job.overrides)
    if code == 0 and job.verb != "train":
        done.return_value, done.status = None, JobStatus.COMPLETED
        return done
    if code == 0 and job.result.exists():
        summary = read_json(Path(job.result.read_text(encoding="utf-8")) / "summary.json")
        done.return_value, done.status = float(summary["val/loss"]), JobStatus.COMPLETED
        return done
    why = last_error(job.log) or exit_words(code)
    done.return_value = UserError(f"{why} (log: {job.log})")
    done.status = JobStatus.FAILED
    return done


def exit_words(code: int) -> str:
    """What an exit code says where the job itself could not say anything."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = ", which is also what a machine without memory does" if name == "SIGKILL" else ""
    return f"killed by {name}{memory}; the same command continues it"


def last_error(log: Path) -> str | None:
    """What a job's log says about its failure."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else None
