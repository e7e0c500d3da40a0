"""hydra/launcher=local: N jobs at a time, each its own process with its share of the threads and its own log."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from polarlm.errors import UserError
from polarlm.launch.board import Board
from polarlm.launch.processes import start_job, stop_job
from polarlm.launch.sweep import note_job
from polarlm.runs.files import read_json
from polarlm.runs.sweeps import RESULT_VARIABLE, SWEPT_VARIABLE, key_of


@dataclass
class Running:
    """A job that has been started."""

    number: int
    overrides: list[str]
    process: Any
    log: Path
    result: Path
    started: float = field(default_factory=time.monotonic)


class LocalLauncher(Launcher):
    """Runs the jobs of a multirun side by side on this machine."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        cores = os.cpu_count() or 1
        for key, value in (("jobs", jobs), ("threads", threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"hydra.launcher.{key}={value} must be a whole number ≥ 1, or null")
        self.jobs = jobs or max(1, cores // (threads or 1))
        self.threads = threads or max(1, cores // self.jobs)

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job; a failed one does not stop the others."""
        folder = Path(self.config.hydra.sweep.dir) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [[text for text in overrides if key_of(text) != "hydra/launcher"] for overrides in job_overrides]
        varied = varying(jobs)
        waiting = list(enumerate(jobs, start=initial_job_idx))
        running: list[Running] = []
        returns: dict[int, JobReturn] = {}
        with Board(len(jobs), self.jobs) as board:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        number, overrides = waiting.pop(0)
                        job = self._start(number, overrides, folder, varied)
                        running.append(job)
                        board.started(number, shown(overrides, varied), job.log)
                    time.sleep(0.2)
                    for job in [job for job in running if job.process.poll() is not None]:
                        running.remove(job)
                        returns[job.number] = ended(job)
                        board.ended(job.number, returns[job.number], time.monotonic() - job.started)
                        note_job(returns[job.number], shown(job.overrides, varied))
                    board.refresh()
            finally:  # Ctrl-C: no job outlives its sweep
                for job in running:
                    stop_job(job.process)
        return [returns[number] for number in sorted(returns)]

    def _start(self, number: int, overrides: list[str], folder: Path, varied: list[str]) -> Running:
        log, result = folder / f"{number:03d}.log", folder / f".{number:03d}.result"
        result.unlink(missing_ok=True)
        environment = {
            "OMP_NUM_THREADS": str(self.threads),
            SWEPT_VARIABLE: " ".join(varied),
            RESULT_VARIABLE: str(result.resolve()),
        }
        return Running(number, overrides, start_job(overrides, environment, log), log, result)


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys whose values differ between jobs, in the order they were typed."""
    values: dict[str, set[str]] = {}
    for overrides in jobs:
        for text in overrides:
            values.setdefault(key_of(text), set()).add(text)
    return [key for key, choices in values.items() if len(choices) > 1] or list(values)[:1]


def shown(overrides: Sequence[str], varied: Sequence[str]) -> str:
    """The overrides that tell a job from the others."""
    return " ".join(text for text in overrides if key_of(text) in varied)


def ended(job: Running) -> JobReturn:
    """What became of a job: its validation loss, or the last line of its log."""
    done = JobReturn(overrides=job.overrides)
    if job.process.returncode == 0 and job.result.exists():
        summary = read_json(Path(job.result.read_text(encoding="utf-8")) / "summary.json")
        done.return_value, done.status = float(summary["val/loss"]), JobStatus.COMPLETED
        return done
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    why = told[-1] if told else f"ended with code {job.process.returncode}"
    done.return_value = UserError(f"{why} (log: {job.log})")
    done.status = JobStatus.FAILED
    return done
