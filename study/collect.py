"""Run folders made by plain train.py calls → rows: a run is known by its settings, not by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarlm.runs.files import read_config, read_json
from polarlm.runs.identity import ADDED, flatten, identity_of
from study.jobs import Planner
from study.plan import PlannedRun, Question
from study.rows import row_of, settings_of_run
from study.summaries import Summary


@dataclass
class Collected:
    """What became of the folders that were looked at."""

    new: int = 0
    renewed: int = 0
    unplanned: list[Path] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    younger: set[str] = field(default_factory=set)  # settings that a collected run does not know yet


@dataclass(frozen=True)
class Place:
    """Where runs of these settings belong."""

    job: PlannedRun  # with the first seed and value; the run's own are put in
    settings: dict[str, Any]
    key: str | None  # the tuned one


def collect(question: Question, folders: Iterable[Path], summary: Summary, planner: Planner) -> Collected:
    """Add the row of every finished run that the question asks for; other runs are only named."""
    places = list(_places(question, planner))
    collected = Collected()
    for folder in sorted(folders):
        config = read_config(folder / "config.yaml")
        if (read_json(folder / "summary.json") or {}).get("status") not in ("finished", "failed"):
            collected.unfinished.append(folder)
            continue
        jobs = [job for place in places if (job := _fitting(question, place, config, collected)) is not None]
        if not jobs:
            collected.unplanned.append(folder)
        for job in jobs:
            is_new = summary.add(row_of(folder, job, question), settings_of_run(config))
            collected.new += is_new
            collected.renewed += not is_new
    return collected


def _places(question: Question, planner: Planner) -> Iterable[Place]:
    for name, part in question.parts.items():
        tune, seeds = question.tuning_of(part), question.seeds_of(part)
        for variant in part.variants:
            stages = [("tune", tune.seed)] if tune else []
            for stage, seed in [*stages, ("seeds", seeds[0])]:
                value = tune.values[0] if tune else None
                job = planner.job(question, name, variant, stage, value, seed)
                yield Place(job, settings_of_run(job.config), tune.key if tune else None)


def _fitting(question: Question, place: Place, config: dict[str, Any], collected: Collected) -> PlannedRun | None:
    """The job that this run is, or None. A setting that one of the two does not know yet does not part them."""
    part = question.parts[place.job.part]
    tune, seeds = question.tuning_of(part), question.seeds_of(part)
    wanted = (tune.seed,) if place.job.stage == "tune" and tune else seeds
    if config.get("seed") not in wanted:
        return None
    ours, theirs = place.settings, settings_of_run(config)
    if differing(ours, theirs, place.key):
        return None
    collected.younger |= set(ours) ^ set(theirs)
    value = dict(flatten(config)).get(place.key) if place.key else None
    overrides = [text for text in place.job.overrides if text.partition("=")[0] not in ("seed", place.key)]
    overrides += [f"{place.key}={value:g}"] if value is not None else []
    overrides.append(f"seed={config['seed']}")
    return replace(
        place.job, value=value, seed=config["seed"], overrides=tuple(overrides), identity=identity_of(config)
    )


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], tuned: str | None) -> list[str]:
    """The settings that both know and that differ, the tuned one aside; a block's later additions are known to all."""
    known = {f"block.{name}": neutral for name, (neutral, *_) in ADDED.items()} | {"match": None}
    ours, theirs = {**known, **ours}, {**known, **theirs}
    return [key for key in ours.keys() & theirs.keys() if key != tuned and ours[key] != theirs[key]]
