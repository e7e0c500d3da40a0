"""Carries out the plan: trains missing runs, resumes interrupted ones and skips finished ones."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.jobs.engine import Board, Place, Policy, run_jobs
from polarlm.jobs.job import FINISHED, Ended, JobSpec
from polarlm.runs.files import read_json
from polarlm.runs.identity import known_runs
from study.jobs import Planner
from study.plan import PlannedRun, Question
from study.rows import IDENTITY_DIGITS, asked_protocols, row_of, settings_of_run, wanted_evaluations
from study.summaries import read_summary, write_summary


@dataclass
class Study:
    """Questions, where their runs lie, where their rows go, and what is known so far."""

    questions: Sequence[Question]
    runs_dir: Path
    summaries: Path
    extra: Sequence[str] = ()
    reuse: bool = False  # rows of committed summaries count as done
    runs: dict[str, tuple[Path, dict[str, Any]]] = field(default_factory=dict)  # identity → folder, summary
    rows: dict[str, float] = field(default_factory=dict)  # identity's beginning → loss of rows that are reused
    failed: set[str] = field(default_factory=set)  # in this session

    def __post_init__(self) -> None:
        self.planner = Planner(self.extra)
        self.runs = known_runs(self.runs_dir)
        if self.reuse:
            for question in self.questions:
                for identity, row in read_summary(self.summaries, question.name).by_identity().items():
                    loss = row.get("val/loss")
                    self.rows[identity] = math.inf if row["status"] != "finished" or loss is None else loss

    def outcome(self, identity: str) -> float | None:
        """The validation loss of a run that ended, inf of one that failed, None of one that is still to be trained."""
        _, summary = self.runs.get(identity, (None, {}))
        if summary.get("status") == "finished":
            loss = summary.get("val/loss")
            return math.inf if loss is None or math.isnan(loss) else float(loss)
        if identity in self.failed:
            return math.inf
        return self.rows.get(identity[:IDENTITY_DIGITS])

    def jobs(self) -> list[tuple[Question, PlannedRun]]:
        """Every job that can be named now, by importance."""
        return [(question, job) for question in self.questions for job in self.planner.ready(question, self.outcome)]

    def waiting(self) -> list[JobSpec]:
        """What is still to be done, each run once: training, then the evaluations of what is trained."""
        missing: dict[str, JobSpec] = {}
        for question, job in self.jobs():
            logs = self.runs_dir / ".study" / "logs"
            log = logs / f"{job.identity[:IDENTITY_DIGITS]}.log"
            if self.outcome(job.identity) is None:
                overrides = [*job.overrides, f"runs_dir={self.runs_dir}", f"group=study-{job.question}-{job.part}"]
                overrides += [] if any(text.startswith("logger") for text in overrides) else ["logger=none"]
                devices = job.config["trainer"]["devices"]
                made = JobSpec(tuple(overrides), log, job.identity, job.label, self.runs_dir, devices=devices)
                missing.setdefault(made.key, made)
            elif settings := self.missing_evaluation(question, job):
                overrides = [f"checkpoint={self.runs[job.identity][0]}", *settings]
                log = log.with_stem(f"{log.stem}-eval")
                made = JobSpec(tuple(overrides), log, job.identity, f"{job.label}: evaluation", self.runs_dir, "eval")
                missing.setdefault(made.key, made)
        return list(missing.values())

    def missing_evaluation(self, question: Question, job: PlannedRun) -> tuple[str, ...]:
        """The settings of eval.py that are still to be asked of a finished run; none when it was asked, or is a row."""
        settings = question.parts[job.part].evaluate
        folder, summary = self.runs.get(job.identity, (None, {}))
        if not settings or job.stage != "seeds" or folder is None or summary.get("status") != "finished":
            return ()
        if ("eval:" + job.identity) in self.failed:
            return ()
        made = {record["protocol"]["name"] for record in wanted_evaluations(folder, settings)}
        return () if asked_protocols(settings) <= made else settings

    def run(self, place: Place, seconds: float | None = None, policy: Policy | None = None) -> bool:
        """Train and evaluate what is missing; True when nothing is left."""
        deadline = None if seconds is None else time.monotonic() + seconds
        waiting = self.waiting()
        self.note_all()
        if waiting:
            board = Board(len(waiting), place.at_once, rank=False)  # losses on different texts have no best
            run_jobs(
                waiting, place, policy=policy, deadline=deadline, board=board, on_end=self._ended, refill=self.waiting
            )
        return not self.waiting() and not self.failed

    def _ended(self, job: JobSpec, how: Ended) -> None:
        if how.status != FINISHED:
            self.failed.add(job.identity if job.verb == "train" else f"eval:{job.identity}")
            self.runs |= {k: v for k, v in known_runs(self.runs_dir).items() if k == job.identity}
        elif how.folder is not None:
            self.runs[job.identity] = how.folder, read_json(how.folder / "summary.json")
        self.note_all({job.identity})

    def note_all(self, only: set[str] | None = None) -> None:
        """Write the rows of all ended runs (or of these) into the summaries."""
        for question in self.questions:
            summary, changed = read_summary(self.summaries, question.name), False
            for job in self.planner.ready(question, self.outcome):
                folder, summary_of_run = self.runs.get(job.identity, (None, {}))
                if folder is None or summary_of_run.get("status") not in ("finished", "failed"):
                    continue
                if only is None or job.identity in only:
                    summary.add(row_of(folder, job, question), settings_of_run(job.config))
                    changed = True
            if changed:
                write_summary(self.summaries, summary, question)

    def seed_folders(self, question: Question, part: str) -> list[Path]:
        """The run folders of a part's finished seeds."""
        jobs = [job for job in self.planner.ready(question, self.outcome) if job.part == part and job.stage == "seeds"]
        known = [self.runs[job.identity] for job in jobs if job.identity in self.runs]
        return list(dict.fromkeys(folder for folder, summary in known if summary.get("status") == "finished"))


def write_pages(study: Study) -> list[Path]:
    """One page per part of which runs are here."""
    from polarlm.report.page import write_page
    from polarlm.report.payload import build_payload
    from polarlm.runs.reading import read_runs
    from polarlm.verdict.groups import group_runs
    from polarlm.verdict.judgement import judge_groups

    pages = []
    for question in study.questions:
        for name, part in question.parts.items():
            folders = study.seed_folders(question, name)
            if not folders:
                continue
            groups = group_runs(read_runs(folders))
            blocks = {group.block for group in groups}
            baseline = part.baseline if part.baseline in blocks else None
            seeds = len(question.seeds_of(part))
            try:
                judgement = judge_groups(
                    groups, question.metric_of(part), baseline, margin=question.margin_of(part), planned_seeds=seeds
                )
            except UserError as error:
                print(f"  no page of {question.name}/{name}: {error}", file=sys.stderr)
                continue
            out = (study.runs_dir / f"{question.name}-{name}.html").absolute()
            write_page(groups, judgement, build_payload(groups, judgement, out), out)
            pages.append(out)
    return pages


def estimate(study: Any, at_once: int, threads: int) -> str:
    """A sentence, or nothing where nothing is left or what is left needs a GPU that is not here."""
    import torch

    from polarlm.jobs.estimate import seconds_of_jobs
    from polarlm.printing import clock

    left = list(missing(study).values())
    if not torch.cuda.is_available() and any(config["trainer"]["accelerator"] == "gpu" for config in left):
        return ""
    seconds = seconds_of_jobs(left, threads) if left else None
    if not seconds:
        return ""
    return (
        f"about {clock(sum(seconds) / at_once)} of training for {len(left)} runs, {at_once} at a time "
        "(a few measured steps; validation and starting come on top)"
    )


def sizes(study: Any) -> dict[str, list[tuple[str, int, float]]]:
    """question/part → (variant, parameters, training FLOPs of a run), with vocabularies of their likely sizes."""
    from polarlm.jobs.estimate import likely_vocabulary
    from polarlm.training.batching import plan_run
    from polarlm.training.plan import untouched_model

    found: dict[str, list[tuple[str, int, float]]] = {}
    for question in study.questions:
        for name, part in question.parts.items():
            lines = found.setdefault(f"{question.name}/{name}", [])
            for variant in part.variants:
                config = study.planner.job(question, name, variant, "seeds", None, question.seeds_of(part)[0]).config
                model = untouched_model(config, likely_vocabulary(config))
                tokens = plan_run(config)[1] * config["trainer"]["batch_tokens"]
                work = model.flops_per_token(config["model"]["context"]) * tokens
                lines.append((variant, model.parameter_count(), float(work)))
    return found


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
