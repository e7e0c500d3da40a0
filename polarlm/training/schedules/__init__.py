"""Learning-rate schedules, counted in tokens: the same curve whatever the batch size or device count.

Chosen by the `schedule` group: each is a dataclass named by its yaml, whose fields are the yaml's keys.
"""

from __future__ import annotations

from typing import Any

from polarlm.errors import UserError
from polarlm.targets import target_of
from polarlm.training.schedules.warmup import Schedule


def build_schedule(schedule: dict[str, Any], total_tokens: int) -> Schedule:
    """The schedule that `schedule` names, checked against the length of the run."""
    build, options = target_of(schedule, "schedule", Schedule)
    try:
        built: Schedule = build(**options)
    except TypeError as error:
        raise UserError(f"schedule has a key it does not know: {error}") from error
    built.check(total_tokens)
    return built
