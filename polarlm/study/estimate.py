"""How long what is left will take, from the runs that are done."""

from __future__ import annotations

from typing import Any


def estimate(study: Any) -> str:
    """A sentence, or nothing while no run has been timed."""
    from polarlm.launch.board import clock
    from polarlm.launch.pool import share_of_cores

    waiting = [job for job in study.waiting() if job.verb == "train"]
    speeds = [
        (summary["seconds"], summary["tokens"] * summary["flops_per_token"])
        for _, summary in study.runs.values()
        if summary.get("status") == "finished" and summary.get("seconds") and summary.get("flops_per_token")
    ]
    if not waiting or not speeds:
        return ""
    mean = sum(seconds for seconds, _ in speeds) / len(speeds)
    jobs, _ = share_of_cores(None, None)
    left = clock(mean * len(waiting) / min(jobs, len(waiting)))
    return f"{len(waiting)} runs to train, about {left} at the mean time of the {len(speeds)} runs that are done"
