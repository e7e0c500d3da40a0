"""Sweeps: what a person reads when a multirun ends."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback


class SweepReport(Callback):
    """Collects how each job ended and prints one table at the end, so that no failure scrolls away unseen."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, str, str]] = []

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        overrides = " ".join(job_return.overrides or [])
        if job_return.status == JobStatus.COMPLETED:
            self.jobs.append(("finished", overrides, f"val loss {job_return.return_value:.4f}"))
        else:
            error = job_return._return_value
            self.jobs.append(("failed", overrides, " ".join(str(error).split())[:200] or type(error).__name__))

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        if not self.jobs:
            return  # a launcher that runs jobs elsewhere (joblib, submitit): their own logs tell
        failed = sum(status == "failed" for status, _, _ in self.jobs)
        print(f"\nSweep: {len(self.jobs) - failed} finished, {failed} failed", file=sys.stderr)
        for status, overrides, text in self.jobs:
            print(f"  {status:8}  {overrides:50}  {text}", file=sys.stderr)
