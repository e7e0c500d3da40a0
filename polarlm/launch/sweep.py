"""Sweeps: what a person reads when a multirun ends."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

_jobs: list[tuple[str, str, str]] = []  # (status, overrides, result) of this process's sweep


class SweepReport(Callback):
    """Notes how each job of a sweep ended. (Jobs that a launcher runs in other processes tell in their own logs.)"""

    def __init__(self) -> None:
        self.sweeping = False

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        self.sweeping = True

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        if not self.sweeping:
            return
        overrides = " ".join(job_return.overrides or [])
        if job_return.status == JobStatus.COMPLETED:
            _jobs.append(("finished", overrides, f"val loss {job_return.return_value:.4f}"))
        else:
            error = job_return._return_value
            _jobs.append(("failed", overrides, " ".join(str(error).split())[:200] or type(error).__name__))


def print_sweep_summary() -> None:
    """Print one line per job, so that no failure scrolls away unseen; Hydra's own hook is not called after one."""
    if not _jobs:
        return
    failed = sum(status == "failed" for status, _, _ in _jobs)
    width = max(len(overrides) for _, overrides, _ in _jobs)
    print(f"\nSweep: {len(_jobs) - failed} finished, {failed} failed", file=sys.stderr)
    for status, overrides, text in _jobs:
        print(f"  {status:8}  {overrides:{width}}  {text}", file=sys.stderr)
