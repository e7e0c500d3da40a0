"""How long what is left of the plan will take: a few measured steps of every kind of run."""

from __future__ import annotations

from typing import Any


def estimate(study: Any, jobs: int | None, threads: int | None) -> str:
    """A sentence, or nothing where nothing is left."""
    from polarlm.launch.estimate import seconds_of_jobs
    from polarlm.launch.pool import share_of_cores
    from polarlm.training.loggers.short_numbers import clock

    left = list(missing(study).values())
    at_once, each = share_of_cores(jobs, threads)
    seconds = seconds_of_jobs(left, each) if left else None
    if not seconds:
        return ""
    return (
        f"about {clock(sum(seconds) / at_once)} of training for {len(left)} runs, {at_once} at a time "
        "(a few measured steps; validation and starting come on top)"
    )


def missing(study: Any) -> dict[str, dict[str, Any]]:
    """identity → configuration of every run to be trained, also of seeds whose value is not chosen yet."""
    configs = {job.identity: job.config for _, job in study.jobs() if study.outcome(job.identity) is None}
    for question in study.questions:
        named = {(j.part, j.variant) for j in study.planner.ready(question, study.outcome) if j.stage == "seeds"}
        for name, part in question.parts.items():
            tune = question.tuning_of(part)
            for variant in part.variants:
                if tune and (name, variant) not in named:
                    for seed in question.seeds_of(part):
                        job = study.planner.job(question, name, variant, "seeds", tune.values[0], seed)
                        configs.setdefault(job.identity, job.config)
    return configs
