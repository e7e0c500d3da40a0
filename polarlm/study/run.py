"""Carrying out the plan: what is missing is trained, what was interrupted goes on, what is there is only counted."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.sweeps import known_runs
from polarlm.study.jobs import Planner
from polarlm.study.plan import PlannedRun, Question
from polarlm.study.rows import IDENTITY_DIGITS, asked_protocols, row_of, settings_of_run, wanted_evaluations
from polarlm.study.summaries import read_summary, write_summary


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
        self._numbers: dict[tuple[str, str], int] = {}
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

    def waiting(self) -> list[Any]:
        """What is still to be done, each run once: training, then the evaluations of what is trained."""
        from polarlm.launch.pool import PoolJob

        missing: dict[tuple[str, str], PoolJob] = {}
        for question, job in self.jobs():
            logs = self.runs_dir / ".study" / "logs"
            if self.outcome(job.identity) is None:
                key = ("train", job.identity)
                overrides = [*job.overrides, f"runs_dir={self.runs_dir}", f"group=study-{job.question}-{job.part}"]
                overrides += [] if any(text.startswith("logger") for text in overrides) else ["logger=none"]
                made = PoolJob(self._number(key), overrides, job.label, logs / f"{job.identity[:IDENTITY_DIGITS]}.log")
                missing.setdefault(key, made)
            elif settings := self.missing_evaluation(question, job):
                key = ("eval", job.identity)
                place = self.runs[job.identity][0]
                log = logs / f"{job.identity[:IDENTITY_DIGITS]}-eval.log"
                overrides = [f"checkpoint={place}", *settings]
                missing.setdefault(key, PoolJob(self._number(key), overrides, f"{job.label}: evaluation", log, "eval"))
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

    def _number(self, key: tuple[str, str]) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, at_once: int | None, threads: int | None, seconds: float | None) -> bool:
        """Train and evaluate what is missing; True when nothing is left."""
        from polarlm.launch.pool import run_pool, share_of_cores

        deadline = None if seconds is None else time.monotonic() + seconds
        waiting = self.waiting()
        self.note_all()
        if waiting:
            jobs, each = share_of_cores(at_once, threads)
            run_pool(
                waiting, jobs, each, deadline=deadline, rank=False, on_end=self._ended, refill=self.waiting
            )  # fmt: skip
        return not self.waiting() and not self.failed

    def _ended(self, job: Any, ended: Any) -> None:
        from hydra.core.utils import JobStatus

        from polarlm.runs.files import read_json

        verb, identity = next(key for key, number in self._numbers.items() if number == job.number)
        if ended.status != JobStatus.COMPLETED:
            self.failed.add(identity if verb == "train" else f"eval:{identity}")
            self.runs |= {k: v for k, v in known_runs(self.runs_dir).items() if k == identity}
        elif verb == "train":
            folder = Path(job.result.read_text(encoding="utf-8"))
            self.runs[identity] = folder, read_json(folder / "summary.json")
        self.note_all({identity})

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
