"""A trial keeps to its plan: equal tuning, paired seeds, the always-valid rule, its budget, resuming after a kill."""

import argparse
import json
import signal
from pathlib import Path

import pytest
import yaml

from polarlm.errors import UserError
from polarlm.jobs import engine, trial
from polarlm.verdict.trials import TrialPlan, edge_note, first_round, next_round, ranked, seconds_of
from tests.synthetic_runs import write_run

BEST = {"standard": 0.003, "polar": 0.001, "xsa": 0.001}


def plan(**changes):
    values = {
        "blocks": ("standard", "polar"),
        "data": "pydocs",
        "model": "nano",
        "steps": 400,
        "metric": "val/bits_per_byte",
        "margin": None,
        "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        "most_seeds": 8,
        "budget_seconds": 1e6,
    }
    return TrialPlan(**(values | changes))


class FakeTrainer:
    """A place where jobs end at once: writes the run folder that the command of a job asks for."""

    outlives, waits = False, True

    def __init__(self, gap=0.0, seconds=10.0, fail=(), at_once=1, before=None, after=None):
        self.gap, self.seconds, self.fail, self.at_once, self.commands = gap, seconds, fail, at_once, []
        self.before, self.after = before, after  # called around the training of a run; may raise, or return a code

    def find(self, job):
        return None

    def start(self, jobs):
        return [Over(self.train(job), self.seconds) for job in jobs]

    def train(self, job):
        options = dict(word.split("=", 1) for word in job.overrides)
        if self.before and (code := self.before(job)):
            return code
        self.commands.append(options)
        block, seed, steps = options["block"], int(options["seed"]), int(options["trainer.max_steps"])
        folder = Path(options["runs_dir"]) / options["name"]
        if options["name"] in self.fail:
            write_run(folder, "standard", seed, steps, diagnostics=False, status="failed")
            return 1
        changes = {"optim.lr": float(options["optim.lr"])}
        write_run(folder, "standard", seed, steps, diagnostics=False, changes=changes | {"choices": {"block": block}})
        summary = json.loads((folder / "summary.json").read_text())
        wrong_rate = 0.1 * abs(float(options["optim.lr"]) - BEST[block])
        noise = 0.002 * ((7 * seed + 3 * len(block)) % 5 - 2)
        gain = self.gap if block == "polar" else 0.0
        for key in ("val/bits_per_byte", "test/bits_per_byte"):
            summary[key] = 2.0 + wrong_rate + noise - gain
        (folder / "summary.json").write_text(json.dumps(summary | {"block": block}))
        if self.after:
            self.after(job)
        job.result.write_text(str(folder))
        return 0


class Over:
    """The handle of a job that has ended."""

    def __init__(self, code, seconds):
        self.code, self.seconds = code, seconds

    def poll(self):
        return self.code

    def stop(self):
        pass


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0)


def test_the_search_halves_alike_for_every_block_and_takes_its_own_best_rate(tmp_path):
    trainer = FakeTrainer(gap=0.05)
    trial.Trial(plan(), tmp_path / "t", trainer).run()
    searched = [c for c in trainer.commands if c["seed"] == "1000"]
    for block in ("standard", "polar"):
        steps = [c["trainer.max_steps"] for c in searched if c["block"] == block]
        assert steps == ["100"] * 5 + ["200"] * 2
    result = json.loads((tmp_path / "t" / "result.json").read_text())
    assert result["learning_rates"] == {"standard": 0.003, "polar": 0.001}


def test_a_clear_difference_ends_the_trial_early_and_a_tie_at_the_last_seed(tmp_path):
    clear = FakeTrainer(gap=0.05)
    assert trial.Trial(plan(), tmp_path / "clear", clear).run() == 0
    result = json.loads((tmp_path / "clear" / "result.json").read_text())
    seeds = {int(c["seed"]) for c in clear.commands if c["seed"] != "1000"}
    assert 4 <= len(seeds) < 8
    assert result["ended"] == "every block is decided"
    assert result["plan_kept"]
    assert "polar: better than standard" in result["verdicts"]["polar"]
    assert (tmp_path / "clear" / "report.html").exists()
    tie = FakeTrainer(gap=0.001)
    trial.Trial(plan(margin=0.0001), tmp_path / "tie", tie).run()
    result = json.loads((tmp_path / "tie" / "result.json").read_text())
    assert result["ended"] == "8 seeds were trained"
    assert len({c["seed"] for c in tie.commands}) == 9


def test_the_plan_is_written_before_anything_runs_and_cannot_be_changed(tmp_path):
    def nothing_yet(job):
        assert yaml.safe_load((tmp_path / "t" / "trial.yaml").read_text())["most_seeds"] == 8
        raise KeyboardInterrupt

    trainer = FakeTrainer(before=nothing_yet)
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(plan(), tmp_path / "t", trainer).run()
    with pytest.raises(UserError, match=r"holds another plan \(most_seeds: 8 → 20\)"):
        trial.Trial(plan(most_seeds=20), tmp_path / "t", trainer)


def test_a_killed_run_ends_the_trial_and_the_same_command_trains_nothing_twice(tmp_path):
    trainer = FakeTrainer(gap=0.05)
    trainer.before = lambda job: -signal.SIGKILL if len(trainer.commands) == 17 else 0
    with pytest.raises(UserError, match="the same command resumes the trial"):
        trial.Trial(plan(), tmp_path / "t", trainer).run()
    trainer.before = None
    trial.Trial(plan(), tmp_path / "t", trainer).run()
    names = [(c["runs_dir"], c["name"]) for c in trainer.commands]
    assert len(names) == len(set(names))
    assert json.loads((tmp_path / "t" / "result.json").read_text())["ended"] == "every block is decided"


def test_a_killed_run_is_started_again_when_retries_are_allowed(tmp_path):
    trainer, killed = FakeTrainer(gap=0.05), []
    trainer.before = lambda job: killed.append(job) or -signal.SIGKILL if not killed else 0
    assert trial.Trial(plan(), tmp_path / "t", trainer, retries=1).run() == 0
    assert len(killed) == 1 and killed[0].name.removeprefix("search/") == trainer.commands[0]["name"]


def test_a_wrong_setting_ends_the_trial_with_its_reason(tmp_path):
    def refused(job):
        job.log.write_text("error: There is no data 'nowhere'\n")
        return 2

    with pytest.raises(UserError, match=r"standard-lr0.0003-100 did not start: There is no data 'nowhere'"):
        trial.Trial(plan(), tmp_path / "t", FakeTrainer(before=refused)).run()
    assert "name" not in (tmp_path / "t" / "progress.jsonl").read_text()  # nothing was learned about the block


def test_two_processes_do_not_carry_out_one_plan(tmp_path):
    def start_another(job):
        with pytest.raises(UserError, match="being written by"):
            trial.Trial(plan(), tmp_path / "t", FakeTrainer()).run()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trial.Trial(plan(), tmp_path / "t", FakeTrainer(before=start_another)).run()


def test_the_budget_ends_a_trial_and_the_result_says_that_the_plan_was_not_kept(tmp_path):
    trial.Trial(plan(budget_seconds=200.0), tmp_path / "t", FakeTrainer(gap=0.05, seconds=10.0)).run()
    result = json.loads((tmp_path / "t" / "result.json").read_text())
    assert result["ended"] == "the budget is spent"
    assert result["seconds"] <= 200
    assert not result["plan_kept"]
    # Two at a time take half of it.
    for at_once in (1, 2):
        trainer = FakeTrainer(gap=0.05, at_once=at_once)
        trial.Trial(plan(budget_seconds=1400.0), tmp_path / str(at_once), trainer).run()
        result = json.loads((tmp_path / str(at_once) / "result.json").read_text())
        assert result["plan_kept"] == (at_once == 2) and result["seconds"] <= 1400


def test_a_budget_decision_is_made_once_whatever_the_clock_says_later(tmp_path):
    """Killed right after deciding to train seed 2, on a machine that is ten times slower from then on."""

    def killed(job):
        if job.name == "seeds/standard-seed2":
            raise KeyboardInterrupt

    limits = plan(budget_seconds=2600.0)
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(limits, tmp_path / "t", FakeTrainer(gap=0.05, before=killed)).run()
    progress = tmp_path / "t" / "progress.jsonl"
    before = [json.loads(line) for line in progress.read_text().splitlines()]
    assert before[-1]["step"] == "seed 2" and before[-1]["go"]
    slow = [{**line, "seconds": 1000.0} if "name" in line else line for line in before]
    progress.write_text("\n".join(map(json.dumps, slow)) + '\n{"name": "cut o')  # and a line that was being written
    trainer = FakeTrainer(gap=0.05)
    trial.Trial(limits, tmp_path / "t", trainer).run()
    assert [c["name"] for c in trainer.commands] == ["standard-seed2", "polar-seed2"]
    after = [json.loads(line) for line in progress.read_text().splitlines() if not line.endswith("cut o")]
    assert after[: len(slow)] == slow and (after[-1]["step"], after[-1]["go"]) == ("seed 3", False)


def test_the_time_of_a_longer_run_grows_by_its_training_only(tmp_path):
    started = trial.Trial(plan(), tmp_path / "t", FakeTrainer())
    done = [{"seconds": 30.0, "training": 10.0, "steps": 100}, {"seconds": 34.0, "training": 14.0, "steps": 100}]
    assert started.expected_seconds(200, done) == pytest.approx(20 + 24)
    assert started.expected_seconds(200, []) == 0


def test_a_rate_that_diverges_is_not_chosen(tmp_path):
    trial.Trial(plan(), tmp_path / "t", FakeTrainer(gap=0.05, fail=("standard-lr0.003-100",))).run()
    assert json.loads((tmp_path / "t" / "result.json").read_text())["learning_rates"]["standard"] == 0.001


def test_rounds_ranks_and_notes():
    first = first_round(plan())
    assert (first.steps, len(first.learning_rates)) == (100, 5)
    losses = {3e-4: 2.0, 1e-3: 1.8, 3e-3: None, 1e-2: float("nan"), 3e-2: 1.9}
    assert ranked(losses)[:3] == [1e-3, 3e-2, 3e-4]
    second = next_round(plan(), first, losses)
    assert (second.steps, second.learning_rates) == (200, (1e-3, 3e-2))
    assert next_round(plan(), second, losses) is None
    assert "upper end" in edge_note("polar", 3e-2, plan())
    assert edge_note("polar", 1e-3, plan()) is None


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400)])
def test_times_are_written_as_people_write_them(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["standard"], "at least two different blocks"),
        (["standard", "polar", "--lr", "0.1"], "at least two positive learning rates"),
        (["standard", "polar", "--lr", "a,b"], "must be numbers"),
        (["standard", "polar", "--seeds", "3"], "decides nothing before four seeds"),
        (["standard", "polar", "--steps", "4"], "at least 8"),
        (["standard", "polar", "--budget", "soon"], "is no time"),
    ],
)
def test_a_plan_that_makes_no_sense_is_one_sentence(tmp_path, words, problem):
    parser = argparse.ArgumentParser()
    trial.add_parser(parser.add_subparsers())
    given = ["trial", *words, "--data", "pydocs", *(["--budget", "1h"] if "--budget" not in words else [])]
    arguments = parser.parse_args([*given, "--out", str(tmp_path / "t")])
    with pytest.raises(UserError, match=problem):
        arguments.run(arguments)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("killed_in", [3, 15, 17, 20])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_killed_trial_ends_as_an_unkilled_one(tmp_path, killed_in, when, at_once):
    """Killed while a run trains, or when it has just ended and nobody has noted so."""
    trial.Trial(plan(), tmp_path / "whole", FakeTrainer(gap=0.02, at_once=at_once)).run()
    trainer = FakeTrainer(gap=0.02, at_once=at_once)

    def killed(job):
        if len(trainer.commands) == killed_in:
            raise KeyboardInterrupt

    setattr(trainer, when, killed)
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(plan(), tmp_path / "killed", trainer).run()
    trainer.before = trainer.after = None
    trial.Trial(plan(), tmp_path / "killed", trainer).run()
    ends = []
    for name in ("whole", "killed"):
        result = json.loads((tmp_path / name / "result.json").read_text())
        looks = json.loads((tmp_path / name / "seeds" / ".looks.json").read_text())
        ends.append(
            [
                {**result, "seconds": 0},
                sorted(looks.values()),
                sorted(p.name for p in (tmp_path / name / "seeds").iterdir()),
            ]
        )
    assert ends[0] == ends[1]
    names = [command["name"] for command in trainer.commands]
    assert len(names) == len(set(names))  # nothing is trained twice
