"""The plan as data: configs/study/<question>.yaml states the question, the rule that decides it and its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from polarlm.errors import UserError, did_you_mean
from polarlm.locations import config_folders
from polarlm.settings import read_settings, setting
from polarlm.verdict.trials import TUNING_SEED

FOLDER = "study"
QUICK = "quick"  # the question of --quick


@dataclass(frozen=True)
class Tuning:
    """The same search for every variant, before its seeds: the value with the lowest validation loss is taken."""

    values: tuple[float, ...]
    key: str = "optim.lr"
    seed: int = TUNING_SEED
    settings: tuple[str, ...] = ()  # shorter runs, for example
    extend: int = setting(1, at_least=0)  # values added beyond an end of the list, as long as the best lies there


@dataclass(frozen=True)
class Part:
    """One comparison: variants that differ in one thing, trained on the same seeds, judged on one number."""

    title: str
    variants: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    metric: str | None = None
    margin: float | None = setting(None, above=0)
    baseline: str | None = None
    compare: str = setting("baseline", choices=("baseline", "previous"))  # previous: a ladder, each rung with the last
    tune: Tuning | None = None
    evaluate: tuple[str, ...] = ()  # settings of eval.py: protocol=length …
    probes: tuple[str, ...] = ()  # diagnostics whose last values are kept
    in_all: bool = True  # false: another part took its place; its rows stay, and it is trained only by name


@dataclass(frozen=True)
class Question:
    """What is asked and decided before anything runs, in its parts."""

    number: int
    title: str
    question: str
    rule: str  # when it ends, in words
    parts: Mapping[str, Part]
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3)
    metric: str = "val/bits_per_byte"
    margin: float | None = setting(0.005, above=0)
    tune: Tuning | None = None
    show: str = setting("differences", choices=("differences", "levels"))  # the table: comparisons, or every mean
    fit: float | None = setting(None, above=0)  # fit the metric against training compute, and extend it to these FLOPs
    in_all: bool = True  # false: only when it is asked for by name (for newcomers, wants a GPU, or is decided)
    name: str = ""

    @property
    def baseline(self) -> str:
        """The baseline of the first part that has one."""
        return next(part.baseline for part in self.parts.values() if part.baseline)

    def seeds_of(self, part: Part) -> tuple[int, ...]:
        return self.seeds if part.seeds is None else part.seeds

    def metric_of(self, part: Part) -> str:
        return part.metric or self.metric

    def margin_of(self, part: Part) -> float | None:
        return part.margin or self.margin

    def tuning_of(self, part: Part) -> Tuning | None:
        return part.tune or self.tune


@dataclass(frozen=True)
class PlannedRun:
    """One training run of the plan."""

    question: str
    part: str
    variant: str
    stage: str  # tune or seeds
    value: float | None  # of the tuned key
    seed: int
    overrides: tuple[str, ...]
    config: dict = field(compare=False, hash=False, default_factory=dict)
    identity: str = ""

    @property
    def label(self) -> str:
        tuned = f" {self.value:g}" if self.value is not None else ""
        return (
            f"{self.question}/{self.part} {self.variant}{tuned} seed {self.seed}{' (tuning)' * (self.stage == 'tune')}"
        )


def plan_files() -> dict[str, Path]:
    """name → file of every question, shipped ones and those in a folder configs/study where the command is typed."""
    return {file.stem: file for place in config_folders() for file in sorted((place / FOLDER).glob("*.yaml"))}


def read_question(name: str) -> Question:
    """The checked plan of one question."""
    files = plan_files()
    if name not in files:
        raise UserError(f"There is no question '{name}'. {did_you_mean(name, files)}Questions: {', '.join(files)}")
    from omegaconf import OmegaConf  # reads 1e-3 as a number, as in every other configuration

    try:
        given = OmegaConf.to_container(OmegaConf.load(files[name]))
    except yaml.YAMLError as error:
        raise UserError(f"{files[name]} can't be read: {str(error).splitlines()[0]}") from None
    if not isinstance(given, Mapping):
        raise UserError(f"{files[name]} must hold number, title, question, rule and parts")
    question = read_settings(Question, {**given, "name": name}, f"study.{name}")
    for key, part in question.parts.items():
        _check(question, f"study.{name}.parts.{key}", part)
    return question


def read_questions(name: str) -> list[Question]:
    """One question, or what belongs to `all`, in the order of their numbers."""
    if name != "all":
        return [read_question(name)]
    return [
        replace(question, parts={key: part for key, part in question.parts.items() if part.in_all})
        for question in every_question()
        if question.in_all
    ]


def every_question() -> list[Question]:
    """Every question there is, in the order of their numbers."""
    return sorted(map(read_question, plan_files()), key=lambda question: (question.number, question.name))


def _check(question: Question, where: str, part: Part) -> None:
    seeds, tune = question.seeds_of(part), question.tuning_of(part)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError(f"{where}.seeds={list(seeds)} must be different numbers, at least one")
    if tune and tune.seed in seeds:
        raise UserError(f"{where}: seed {tune.seed} chooses the {tune.key}, so it can't be one of the seeds that count")
    if part.compare == "baseline" and part.baseline not in part.variants:
        names = ", ".join(part.variants)
        raise UserError(f"{where}.baseline={part.baseline} must be one of its variants: {names}")
