"""`python -m polarlm trial standard xsa polar --data … --budget 2h`: from nothing to a verdict with one command."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.jobs.engine import Place, Policy, run_jobs
from polarlm.jobs.job import FINISHED, Ended, JobSpec
from polarlm.jobs.places import add_place_options, chosen_place

PURPOSE = "tune all blocks equally, train paired seeds until the verdict is decided"
DESCRIPTION = """The same learning-rate search for every block, then paired seeds until every block is decided against
the first one or the budget is spent, then the report."""
EPILOG = """examples
  python -m polarlm trial standard xsa polar --data pydocs --budget 2h
  python -m polarlm trial standard polar --data text --budget 30m --steps 400 --set data.path=book.txt tokenizer=char

The plan is written to trial.yaml before anything runs; the same command resumes a killed trial.
"""


def add_parser(verbs: Any) -> None:
    """Add the verb `trial` to the command line."""
    parser = verbs.add_parser("trial", help=PURPOSE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("blocks", nargs="+", help="blocks to compare; the first is the reference")
    parser.add_argument("--data", required=True, help="the corpus (configs/data)")
    parser.add_argument("--budget", required=True, help="time for everything: 90s, 15m, 2h")
    parser.add_argument("--model", default="nano", help="the size (nano; configs/model)")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of a run that counts (1000)")
    parser.add_argument(
        "--lr", default="3e-4,1e-3,3e-3,1e-2,3e-2", help="learning rates tried for every block (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=12, help="at most so many paired seeds (12)")
    parser.add_argument("--metric", default="val/bits_per_byte", help="the loss that decides (%(default)s)")
    parser.add_argument("--margin", type=float, help="differences below this do not matter (0.005 bits per byte)")
    parser.add_argument("--out", type=Path, help="the trial's folder (runs/trials/<blocks>-<data>)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run, as train.py takes them"
    )
    add_place_options(parser)
    parser.set_defaults(run=run_trial)


def run_trial(arguments: argparse.Namespace) -> int:
    """Carry out or continue a trial; returns the exit code."""
    from polarlm.verdict.trials import TrialPlan, seconds_of

    blocks = tuple(arguments.blocks)
    try:
        rates = tuple(float(word) for word in str(arguments.lr).split(","))
    except ValueError:
        raise UserError(f"--lr {arguments.lr!r} must be numbers with commas between, e.g. 1e-3,3e-3") from None
    plan = TrialPlan(
        blocks=blocks,
        data=arguments.data,
        model=arguments.model,
        steps=arguments.steps,
        metric=arguments.metric,
        margin=arguments.margin,
        learning_rates=rates,
        most_seeds=arguments.seeds,
        budget_seconds=seconds_of(arguments.budget),
        overrides=tuple(arguments.set),
    ).check()
    folder = arguments.out or Path("runs") / "trials" / f"{'-'.join(blocks)}-{plan.data}"
    place = chosen_place(arguments, Path(folder), [arguments.set])
    return Trial(plan, Path(folder), place, arguments.retries).run()


@dataclass(frozen=True)
class TrialRun:
    """A run of the trial."""

    phase: str  # search or seeds
    name: str
    block: str
    rate: float
    steps: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.phase}/{self.name}"


class Trial:
    """A plan in its folder: trial.yaml, progress.jsonl (a line per job), search/ and seeds/ (runs), report.html."""

    def __init__(self, plan: Any, folder: Path, place: Place, retries: int = 0) -> None:
        self.plan, self.folder, self.place, self.retries = plan, folder, place, retries
        self.progress = folder / "progress.jsonl"
        self.write_plan()

    def write_plan(self) -> None:
        """Write the plan, or find the same one there."""
        import yaml

        from polarlm.runs.files import write_text
        from polarlm.verdict.trials import TrialPlan

        path = self.folder / "trial.yaml"
        if not path.exists():
            write_text(path, yaml.safe_dump(self.plan.as_dict(), sort_keys=False))
            return
        try:
            written = TrialPlan.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        if written != self.plan:
            old, new = written.as_dict(), self.plan.as_dict()
            changed = [f"{key}: {old[key]} → {new[key]}" for key in old if old[key] != new[key]]
            raise UserError(
                f"{path} holds another plan ({'; '.join(changed[:3])}). A plan is not changed once it is written: "
                "repeat the same command to continue, or choose another --out"
            )

    def run(self) -> int:
        """Search, train seeds, judge after each, report."""
        from polarlm.runs.lock import lock_folder

        plan, lock = self.plan, lock_folder(self.folder)  # two processes with one plan would train everything twice
        print(f"Trial in {self.folder}: {', '.join(plan.blocks)} on {plan.data}; rule: {plan.rule}.", flush=True)
        rates, notes = self.search()
        judgement, why = None, "the budget is spent"
        if rates is not None:
            for note in notes:
                print(f"  note: {note}")
            judgement, why = self.seeds(rates)
        kept = self.is_plan_kept(why)
        self.finish(judgement, rates, notes, why, kept)
        lock.release()
        return 0

    def search(self) -> tuple[dict[str, float] | None, list[str]]:
        """The best learning rate of every block by successive halving; None when the budget ends before."""
        from polarlm.verdict.trials import TUNING_SEED, edge_note, first_round, next_round, ranked

        rounds: dict[str, Any] = dict.fromkeys(self.plan.blocks, first_round(self.plan))
        best: dict[str, float] = {}
        number = 0
        while rounds:
            number += 1
            runs = [
                TrialRun("search", f"{block}-lr{rate:g}-{now.steps}", block, rate, now.steps, TUNING_SEED)
                for block, now in rounds.items()
                for rate in now.learning_rates
            ]
            if not self.train(f"search, round {number}", runs):
                return None, []
            for block, now in list(rounds.items()):
                losses = {run.rate: self.loss(run) for run in runs if run.block == block}
                known = {rate: loss for rate, loss in losses.items() if loss is not None}
                tried = ", ".join(f"{r:g} → {v:.4f}" for r, v in known.items())
                print(f"  {block}, {now.steps} steps: {tried or 'no rate gave a finite loss'}", flush=True)
                following = next_round(self.plan, now, losses)
                if following is None:
                    best[block] = ranked(losses)[0]
                    del rounds[block]
                else:
                    rounds[block] = following
        notes = [note for block, rate in best.items() if (note := edge_note(block, rate, self.plan))]
        return best, notes

    def seeds(self, rates: dict[str, float]) -> tuple[Any, str]:
        """Paired seeds one by one; (the last judgement, why it ended)."""
        from polarlm.verdict.trials import is_decided

        judgement = None
        for seed in range(1, self.plan.most_seeds + 1):
            runs = [
                TrialRun("seeds", f"{block}-seed{seed}", block, rates[block], self.plan.steps, seed)
                for block in self.plan.blocks
            ]
            if not self.train(f"seed {seed}", runs):
                return judgement, "the budget is spent"
            if seed >= 2:
                judgement = self.judge(seed)
                words = [f"{row.group.block} {row.outcome}" for row in judgement.rows]
                print(f"  {seed} seeds: {'; '.join(words)}", flush=True)
                if is_decided(judgement):
                    return judgement, "every block is decided"
        return judgement, f"{self.plan.most_seeds} seeds were trained"

    def judge(self, last: int) -> Any:
        """The verdict over the seeds up to `last`, by the always-valid rule; a killed trial may have trained more."""
        from polarlm.runs.reading import find_run_folders, read_runs
        from polarlm.verdict.groups import group_runs
        from polarlm.verdict.judgement import Looks, judge_groups

        names = {f"{block}-seed{seed}" for block in self.plan.blocks for seed in range(1, last + 1)}
        folders = [folder for folder in find_run_folders([self.folder / "seeds"]) if folder.name in names]
        groups = group_runs(read_runs(folders))
        looks = Looks.beside([run for group in groups for run in group.runs])
        looks.every_time = True
        plan = self.plan
        judgement = judge_groups(groups, plan.metric, plan.blocks[0], margin=plan.margin, looks=looks)
        looks.record(judgement.looked)
        return judgement

    def train(self, step: str, runs: list[TrialRun]) -> bool:
        """Train what is missing of these runs; False when the budget does not allow it.

        Whether it does is decided once and noted before anything is started: the clock of another sitting cannot
        change it.
        """
        width = self.side_by_side(runs)
        if not self.jobs() and len(runs) > width:  # the first runs tell how long the others will take
            return self.train("the first runs", runs[:width]) and self.train(step, runs)
        noted = self.notes()
        done = {line["name"]: line for line in noted if "name" in line}
        decided = {line["step"]: line["go"] for line in noted if "step" in line}
        if step not in decided:
            spent = self.seconds_spent()
            known = [line for line in done.values() if line["code"] == 0]
            expected = sum(self.expected_seconds(run.steps, known) for run in runs if run.key not in done) / width
            decided[step] = spent + expected <= self.plan.budget_seconds
            self.note({"step": step, "go": decided[step], "spent": spent, "expected": expected})
        if not decided[step]:
            return False
        missing = {}
        for run in runs:
            if run.key not in done and self.is_finished(run):  # by a trial that was killed before it noted so
                self.ended(run, Ended(FINISHED), width)
            elif run.key not in done:
                missing[self.job(run).key] = run
        run_jobs(
            [self.job(run) for run in missing.values()],
            self.place,
            policy=Policy(retries=self.retries),
            on_end=lambda job, how: self.ended(missing[job.key], how, width),
        )
        return True

    def side_by_side(self, runs: list[TrialRun]) -> int:
        """How many of these runs are trained at a time."""
        return min(self.place.at_once, len(runs))

    def seconds_spent(self) -> float:
        """Time that the runs so far have taken; of runs side by side each its share."""
        return sum(line["seconds"] / line.get("beside", 1) for line in self.jobs())

    def is_finished(self, run: TrialRun) -> bool:
        """Whether a run has ended well."""
        from polarlm.runs.reading import read_run

        folder = self.folder / run.phase / run.name
        return folder.is_dir() and read_run(folder).status == FINISHED

    def job(self, run: TrialRun) -> JobSpec:
        """The training job of a run."""
        plan = self.plan
        settings = [f"block={run.block}", f"data={plan.data}", f"model={plan.model}", f"optim.lr={run.rate:g}"]
        settings += [f"trainer.max_steps={run.steps}", f"seed={run.seed}", "logger=none", *plan.overrides]
        settings += [f"name={run.name}", f"runs_dir={self.folder / run.phase}"]
        return JobSpec(
            tuple(settings), self.folder / "logs" / f"{run.phase}-{run.name}.log", name=run.key,
            runs_dir=self.folder / run.phase,
        )  # fmt: skip

    def ended(self, run: TrialRun, how: Ended, beside: int) -> None:
        """Note how a run ended; a run that was killed or refused has not failed, it ends the trial."""
        if how.code < 0 or how.code in (130, 143):
            raise UserError(f"{run.key} was stopped from outside (code {how.code}); the same command resumes the trial")
        folder = self.folder / run.phase / run.name
        if how.code and not (folder / "config.yaml").exists():  # a wrong setting, not a bad block
            raise UserError(f"{run.key} did not start: {how.error}")
        training = self.training_seconds(run)
        # A run that was interrupted has trained longer than the process that ended it.
        seconds = max(how.seconds, training or 0.0)
        line = {"name": run.key, "block": run.block, "steps": run.steps, "code": how.code, "seconds": seconds}
        self.note({**line, "training": training, "beside": beside})

    def note(self, line: dict[str, Any]) -> None:
        """Append a line to progress.jsonl."""
        with self.progress.open("ab") as file:
            # A line that a kill cut off must not swallow this one.
            file.write(b"\n" if file.tell() else b"")
            file.write(json.dumps(line).encode())

    def expected_seconds(self, steps: int, done: list[dict[str, Any]]) -> float:
        """Starting and ending a job takes the same for any length; only training grows with the steps."""
        if not done:
            return 0.0
        training = [min(job["training"] or 0.0, job["seconds"]) for job in done]
        fixed = sum(job["seconds"] - t for job, t in zip(done, training)) / len(done)
        return fixed + steps * sum(training) / sum(job["steps"] for job in done)

    def training_seconds(self, run: TrialRun) -> float | None:
        """Seconds that a run spent training, as it recorded them."""
        from polarlm.runs.reading import read_run

        folder = self.folder / run.phase / run.name
        return read_run(folder).number("seconds") if folder.is_dir() else None

    def notes(self) -> list[dict[str, Any]]:
        """What was decided and done so far; a line that a kill cut off does not count."""
        from polarlm.runs.files import json_lines

        return json_lines(self.progress)

    def jobs(self) -> list[dict[str, Any]]:
        """The runs that have ended."""
        return [line for line in self.notes() if "name" in line]

    def loss(self, run: TrialRun) -> float | None:
        """The deciding number of a run, None where it has none."""
        from polarlm.runs.reading import read_run
        from polarlm.verdict.measure import Measure

        read = read_run(self.folder / run.phase / run.name)
        return Measure(self.plan.metric).value(read) if read.status == "finished" else None

    def is_plan_kept(self, why: str) -> list[str]:
        """What was not as planned; empty when the plan was kept."""
        problems = []
        jobs = self.jobs()
        spent = self.seconds_spent()
        if spent > 1.1 * self.plan.budget_seconds:
            problems.append(f"{spent:.0f} s were spent of {self.plan.budget_seconds:.0f} s")
        failed = [job["name"] for job in jobs if job["code"] and job["name"].startswith("seeds/")]
        if failed:
            problems.append(f"failed: {', '.join(failed)}")
        if why == "the budget is spent":
            problems.append("the budget ended before the verdict was decided or all seeds were trained")
        return problems

    def finish(self, judgement: Any, rates: Any, notes: list[str], why: str, problems: list[str]) -> None:
        """Say what was found and whether the plan was kept; write result.json and the report."""
        from polarlm.runs.files import write_json
        from polarlm.verdict.headline import headline

        finding = headline(judgement) if judgement else "No verdict: no paired seeds were trained"
        kept = "The plan was kept." if not problems else f"The plan was not kept: {'; '.join(problems)}."
        result = {"finding": finding, "ended": why, "plan_kept": not problems, "problems": problems, "notes": notes}
        result |= {"learning_rates": rates, "seconds": self.seconds_spent()}
        if judgement:
            result["verdicts"] = {row.group.block: row.sentence for row in judgement.rows}
        write_json(self.folder / "result.json", result)
        print(f"{finding}\n  Ended because {why}. {kept}")
        if judgement:
            self.write_report(judgement)
            print(f"  {self.folder / 'report.html'}")

    def write_report(self, judgement: Any) -> None:
        """The page of the seeds."""
        from polarlm.report.page import write_page
        from polarlm.report.payload import build_payload

        groups = [row.group for row in judgement.rows]
        out = (self.folder / "report.html").absolute()
        write_page(groups, judgement, build_payload(groups, judgement, out), out)
