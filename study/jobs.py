"""The runs of a question: first those of the search, then the seeds with each variant's best value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.identity import identity_of
from study.plan import Part, PlannedRun, Question, Tuning

Outcome = Callable[[str], float | None]  # identity → validation loss, inf when it failed, None when it did not run yet


class Planner:
    """Expands questions into jobs; `extra` are settings for every run (trainer=gpu, for example)."""

    def __init__(self, extra: Sequence[str] = ()) -> None:
        self.extra = tuple(extra)
        self._composed: dict[tuple[str, ...], dict[str, Any]] = {}
        self._made: dict[tuple[Any, ...], tuple[dict[str, Any], str]] = {}

    def ready(self, question: Question, outcome: Outcome) -> list[PlannedRun]:
        """Every job that can be named now, done or not; calling again with more outcomes names more.

        The first seed of all variants of a part comes before their second, so that a study that stops early has pairs.
        """
        jobs: list[PlannedRun] = []
        for name, part in question.parts.items():
            seeds = question.seeds_of(part)
            of_part = [job for variant in part.variants for job in self.variant_jobs(question, name, variant, outcome)]
            jobs += sorted(of_part, key=lambda job: -1 if job.stage == "tune" else seeds.index(job.seed))
        return jobs

    def variant_jobs(self, question: Question, part: str, variant: str, outcome: Outcome) -> Iterator[PlannedRun]:
        """The jobs of one variant that can be named now."""
        chosen_part = question.parts[part]
        tune = question.tuning_of(chosen_part)
        value = None
        if tune:
            trials: dict[float, PlannedRun] = {}
            while new := next_values(tune, {v: outcome(job.identity) for v, job in trials.items()}):
                trials |= {v: self.job(question, part, variant, "tune", v, tune.seed) for v in new}
                if any(outcome(trials[v].identity) is None for v in new):
                    break
            yield from trials.values()
            value = best_value({v: outcome(job.identity) for v, job in trials.items()})
            if value is None:
                return
        for seed in question.seeds_of(chosen_part):
            yield self.job(question, part, variant, "seeds", value, seed)

    def job(
        self, question: Question, part: str, variant: str, stage: str, value: float | None, seed: int
    ) -> PlannedRun:
        """One run, composed and checked."""
        chosen_part = question.parts[part]
        tune = question.tuning_of(chosen_part)
        overrides = settings_of(question, chosen_part, variant, tune if stage == "tune" else None, self.extra)
        tuned: dict[str, Any] = {tune.key: float(f"{value:g}")} if tune and value is not None else {}
        key = (*overrides, *tuned.items(), seed)
        if key not in self._made:
            # Composing takes a tenth of a second, and no shipped yaml derives anything from the seed or a tuned number.
            config = copy.deepcopy(self._compose(tuple(overrides)))
            for name, number in {**tuned, "seed": seed}.items():
                set_in(config, name, number)
            self._made[key] = config, identity_of(config)
        config, identity = self._made[key]
        overrides += [*(f"{name}={number:g}" for name, number in tuned.items()), f"seed={seed}"]
        return PlannedRun(question.name, part, variant, stage, value, seed, tuple(overrides), config, identity)

    def _compose(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        from polarlm.launch.overrides import config_loader, plan_jobs

        if overrides not in self._composed:
            try:
                (job,) = plan_jobs(config_loader(), "train", list(overrides), multirun=False).jobs
            except UserError as error:
                raise UserError(f"The study's run `{' '.join(overrides)}`: {error}") from None
            assert job.config is not None
            self._composed[overrides] = job.config
        return self._composed[overrides]


def set_in(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key that is there; another one is a UserError."""
    *parents, leaf = key.split(".")
    place = config
    for parent in parents:
        place = place.get(parent, {})
    if leaf not in place:
        raise UserError(f"The study tunes {key}, which is no setting of its runs; see polarlm train --cfg job")
    place[leaf] = value


def settings_of(
    question: Question, part: Part, variant: str, tune: Tuning | None = None, extra: Sequence[str] = ()
) -> list[str]:
    """The overrides of a variant; a later one for the same key wins."""
    from polarlm.runs.identity import key_of

    given = [*question.settings, *part.settings, *part.variants[variant], *(tune.settings if tune else ()), *extra]
    return list({key_of(text): text for text in given}.values())


def next_values(tune: Tuning, losses: Mapping[float, float | None]) -> list[float]:
    """Values to try now: the list, then one more beyond an end for as long as the best lies there; [] when decided."""
    if not losses:
        return sorted(tune.values)
    best = best_value(losses)
    if best is None or len(losses) < 2:
        return []
    tried, listed = sorted(losses), sorted(tune.values)
    ratio = listed[1] / listed[0] if len(listed) > 1 else 2.0
    below = sum(v < listed[0] for v in tried)
    above = sum(v > listed[-1] for v in tried)
    if best == tried[0] and below < tune.extend:
        return [float(f"{tried[0] / ratio:.3g}")]
    if best == tried[-1] and above < tune.extend:
        return [float(f"{tried[-1] * ratio:.3g}")]
    return []


def best_value(losses: Mapping[float, float | None]) -> float | None:
    """The value with the lowest loss, the smaller one of two equals; None while one is unknown or none is finite."""
    if not losses or any(loss is None for loss in losses.values()):
        return None
    loss, value = min((math.inf if math.isnan(l) else l, v) for v, l in losses.items() if l is not None)
    return None if math.isinf(loss) else value
