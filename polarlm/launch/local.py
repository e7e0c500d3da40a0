"""hydra/launcher=local: N jobs at a time, each its own process with its share of the threads and its own log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher

from polarlm.errors import UserError
from polarlm.launch.pool import PoolJob, run_pool, share_of_cores
from polarlm.launch.sweep import note_job
from polarlm.runs.sweeps import key_of


class LocalLauncher(Launcher):
    """Runs the jobs of a multirun side by side on this machine."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        for key, value in (("jobs", jobs), ("threads", threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"hydra.launcher.{key}={value} must be a whole number ≥ 1, or null")
        self.jobs, self.threads = share_of_cores(jobs, threads)

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job; a failed one does not stop the others."""
        folder = Path(self.config.hydra.sweep.dir) / "logs"
        jobs = [[text for text in overrides if key_of(text) != "hydra/launcher"] for overrides in job_overrides]
        varied = varying(jobs)
        planned = [
            PoolJob(number, overrides, shown(overrides, varied), folder / f"{number:03d}.log", swept=varied)
            for number, overrides in enumerate(jobs, start=initial_job_idx)
        ]
        returns = run_pool(planned, self.jobs, self.threads, on_end=lambda job, ended: note_job(ended, job.name))
        return [returns[number] for number in sorted(returns)]


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
