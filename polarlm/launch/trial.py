"""`python -m polarlm trial standard xsa polar --data … --budget 2h`: from nothing to a verdict with one command."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

PURPOSE = "tune every block alike, train paired seeds until the verdict is decided, write the report"
DESCRIPTION = """The same learning-rate search for every block, then paired seeds until every block is decided against
the first one or the budget is spent, then the report."""
EPILOG = """examples
  python -m polarlm trial standard xsa polar --data pydocs --budget 2h
  python -m polarlm trial standard polar --data text --budget 30m --steps 400 --set data.path=book.txt tokenizer=char

The plan is written to trial.yaml before anything runs; the same command continues a killed trial.
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
    return Trial(plan, Path(folder)).run()


def run_job(settings: list[str], log: Path) -> int:
    """Train with these settings in a process that ends with this one, however that ends; its exit code."""
    from polarlm.launch.processes import start_job, stop_job

    process = start_job(settings, {}, log)
    try:
        return int(process.wait())
    finally:
        stop_job(process)


class Trial:
    """A plan in its folder: trial.yaml, progress.jsonl (a line per job), search/ and seeds/ (runs), report.html."""

    def __init__(self, plan: Any, folder: Path) -> None:
        self.plan, self.folder = plan, folder
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

        best: dict[str, float] = {}
        notes: list[str] = []
        for block in self.plan.blocks:
            current = first_round(self.plan)
            losses: dict[float, float | None] = {}
            while current is not None:
                losses = {}
                for rate in current.learning_rates:
                    name = f"{block}-lr{rate:g}-{current.steps}"
                    if not self.train("search", name, block, rate, current.steps, TUNING_SEED):
                        return None, notes
                    losses[rate] = self.loss("search", name)
                known = {rate: loss for rate, loss in losses.items() if loss is not None}
                tried = ", ".join(f"{r:g} → {v:.4f}" for r, v in known.items())
                print(f"  {block}, {current.steps} steps: {tried or 'no rate gave a finite loss'}", flush=True)
                following = next_round(self.plan, current, losses)
                if following is None:
                    break
                current = following
            best[block] = ranked(losses)[0]
            note = edge_note(block, best[block], self.plan)
            notes += [note] if note else []
        return best, notes

    def seeds(self, rates: dict[str, float]) -> tuple[Any, str]:
        """Paired seeds one by one; (the last judgement, why it ended)."""
        from polarlm.verdict.trials import is_decided

        judgement = None
        for seed in range(1, self.plan.most_seeds + 1):
            for block in self.plan.blocks:
                if not self.train("seeds", f"{block}-seed{seed}", block, rates[block], self.plan.steps, seed):
                    return judgement, "the budget is spent"
            if seed >= 2:
                judgement = self.judge()
                words = [f"{row.group.block} {row.outcome}" for row in judgement.rows]
                print(f"  {seed} seeds: {'; '.join(words)}", flush=True)
                if is_decided(judgement):
                    return judgement, "every block is decided"
        return judgement, f"{self.plan.most_seeds} seeds were trained"

    def judge(self) -> Any:
        """The verdict over the seeds so far, by the always-valid rule."""
        from polarlm.runs.reading import find_run_folders, read_runs
        from polarlm.verdict.groups import group_runs
        from polarlm.verdict.judgement import judge_groups
        from polarlm.verdict.looks import Looks

        groups = group_runs(read_runs(find_run_folders([self.folder / "seeds"])))
        looks = Looks.beside([run for group in groups for run in group.runs])
        looks.every_time = True
        plan = self.plan
        judgement = judge_groups(groups, plan.metric, plan.blocks[0], margin=plan.margin, looks=looks)
        looks.record(judgement.looked)
        return judgement

    def train(self, phase: str, name: str, block: str, rate: float, steps: int, seed: int) -> bool:
        """Train one run unless it is there; False when the budget does not allow it."""
        from polarlm.launch.pool import last_error

        done = {job["name"]: job for job in self.jobs()}
        key = f"{phase}/{name}"
        if key in done:
            return True
        spent = sum(job["seconds"] for job in done.values())
        expected = self.expected_seconds(steps, [job for job in done.values() if job["code"] == 0])
        if spent + expected > self.plan.budget_seconds:
            return False
        settings = [f"block={block}", f"data={self.plan.data}", f"model={self.plan.model}", f"optim.lr={rate:g}"]
        settings += [f"trainer.max_steps={steps}", f"seed={seed}", "logger=none", *self.plan.overrides]
        started = time.monotonic()
        code = run_job([*settings, f"name={name}", f"runs_dir={self.folder / phase}"], self.folder / "jobs.log")
        if code < 0 or code in (130, 143):  # killed, not failed
            raise UserError(f"{key} was stopped from outside (code {code}); the same command continues the trial")
        if code and not (self.folder / phase / name / "config.yaml").exists():  # a wrong setting, not a bad block
            why = last_error(self.folder / "jobs.log") or f"see {self.folder / 'jobs.log'}"
            raise UserError(f"{key} did not start: {why}")
        training = self.training_seconds(phase, name)
        # A run that was interrupted has trained longer than the process that ended it.
        seconds = max(time.monotonic() - started, training or 0.0)
        job = {"name": key, "block": block, "steps": steps, "code": code, "seconds": seconds, "training": training}
        with self.progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(job) + "\n")
        return True

    def expected_seconds(self, steps: int, done: list[dict[str, Any]]) -> float:
        """Starting and ending a job takes the same for any length; only training grows with the steps."""
        if not done:
            return 0.0
        training = [min(job["training"] or 0.0, job["seconds"]) for job in done]
        fixed = sum(job["seconds"] - t for job, t in zip(done, training)) / len(done)
        return fixed + steps * sum(training) / sum(job["steps"] for job in done)

    def training_seconds(self, phase: str, name: str) -> float | None:
        """Seconds that a run spent training, as it recorded them."""
        from polarlm.runs.reading import read_run

        folder = self.folder / phase / name
        return read_run(folder).number("seconds") if folder.is_dir() else None

    def jobs(self) -> list[dict[str, Any]]:
        """What was done so far; a line that a kill cut off does not count."""
        from polarlm.runs.files import json_lines

        return json_lines(self.progress)

    def loss(self, phase: str, name: str) -> float | None:
        """The deciding number of a run, None where it has none."""
        from polarlm.runs.reading import read_run
        from polarlm.verdict.measure import Measure

        run = read_run(self.folder / phase / name)
        return Measure(self.plan.metric).value(run) if run.status == "finished" else None

    def is_plan_kept(self, why: str) -> list[str]:
        """What was not as planned; empty when the plan was kept."""
        problems = []
        jobs = self.jobs()
        spent = sum(job["seconds"] for job in jobs)
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
        result |= {"learning_rates": rates, "seconds": sum(job["seconds"] for job in self.jobs())}
        if judgement:
            result["verdicts"] = {row.group.block: row.sentence for row in judgement.rows}
        write_json(self.folder / "result.json", result)
        print(f"{finding}\n  Ended because {why}. {kept}")
        if judgement:
            self.write_report()
            print(f"  {self.folder / 'report.html'}")

    def write_report(self) -> None:
        """The page of the seeds."""
        from polarlm.report.page import write_page
        from polarlm.report.payload import build_payload

        judgement = self.judge()
        groups = [row.group for row in judgement.rows]
        out = (self.folder / "report.html").absolute()
        write_page(groups, judgement, build_payload(groups, judgement, out), out)
