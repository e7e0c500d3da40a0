"""A trial keeps to its plan: equal tuning, paired seeds, the always-valid rule, its budget, resuming after a kill."""

import argparse
import json
import signal
from pathlib import Path

import pytest
import yaml

from polarlm.errors import UserError
from polarlm.launch import trial
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
    """Stands in for `polarlm train`: writes the run folder that the command asks for, at once."""

    def __init__(self, monkeypatch, gap=0.0, seconds=10.0, fail=()):
        self.gap, self.seconds, self.fail, self.commands, self.now = gap, seconds, fail, [], 0.0
        monkeypatch.setattr(trial, "run_job", self)
        monkeypatch.setattr(trial.time, "monotonic", lambda: self.now)

    def __call__(self, settings, log):
        options = dict(word.split("=", 1) for word in settings)
        self.commands.append(options)
        self.now += self.seconds
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
        return 0


def test_the_search_halves_alike_for_every_block_and_takes_its_own_best_rate(tmp_path, monkeypatch):
    trainer = FakeTrainer(monkeypatch, gap=0.05)
    trial.Trial(plan(), tmp_path / "t").run()
    searched = [c for c in trainer.commands if c["seed"] == "1000"]
    for block in ("standard", "polar"):
        steps = [c["trainer.max_steps"] for c in searched if c["block"] == block]
        assert steps == ["100"] * 5 + ["200"] * 2
    result = json.loads((tmp_path / "t" / "result.json").read_text())
    assert result["learning_rates"] == {"standard": 0.003, "polar": 0.001}


def test_a_clear_difference_ends_the_trial_early_and_a_tie_at_the_last_seed(tmp_path, monkeypatch):
    clear = FakeTrainer(monkeypatch, gap=0.05)
    assert trial.Trial(plan(), tmp_path / "clear").run() == 0
    result = json.loads((tmp_path / "clear" / "result.json").read_text())
    seeds = {int(c["seed"]) for c in clear.commands if c["seed"] != "1000"}
    assert 4 <= len(seeds) < 8
    assert result["ended"] == "every block is decided"
    assert result["plan_kept"]
    assert "polar: better than standard" in result["verdicts"]["polar"]
    assert (tmp_path / "clear" / "report.html").exists()
    tie = FakeTrainer(monkeypatch, gap=0.001)
    trial.Trial(plan(margin=0.0001), tmp_path / "tie").run()
    result = json.loads((tmp_path / "tie" / "result.json").read_text())
    assert result["ended"] == "8 seeds were trained"
    assert len({c["seed"] for c in tie.commands}) == 9


def test_the_plan_is_written_before_anything_runs_and_cannot_be_changed(tmp_path, monkeypatch):
    def nothing_yet(settings, log):
        assert yaml.safe_load((tmp_path / "t" / "trial.yaml").read_text())["most_seeds"] == 8
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_job", nothing_yet)
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(plan(), tmp_path / "t").run()
    with pytest.raises(UserError, match=r"holds another plan \(most_seeds: 8 → 20\)"):
        trial.Trial(plan(most_seeds=20), tmp_path / "t")


def test_a_killed_trial_goes_on_and_trains_nothing_twice(tmp_path, monkeypatch):
    trainer = FakeTrainer(monkeypatch, gap=0.05)

    def kill_in_the_middle(settings, log):
        return -signal.SIGKILL if len(trainer.commands) == 17 else trainer(settings, log)

    monkeypatch.setattr(trial, "run_job", kill_in_the_middle)
    with pytest.raises(UserError, match="the same command continues the trial"):
        trial.Trial(plan(), tmp_path / "t").run()
    monkeypatch.setattr(trial, "run_job", trainer)
    trial.Trial(plan(), tmp_path / "t").run()
    names = [(c["runs_dir"], c["name"]) for c in trainer.commands]
    assert len(names) == len(set(names))
    assert json.loads((tmp_path / "t" / "result.json").read_text())["ended"] == "every block is decided"


def test_a_wrong_setting_ends_the_trial_with_its_reason(tmp_path, monkeypatch):
    def refused(settings, log):
        log.write_text("error: There is no data 'nowhere'\n")
        return 2

    monkeypatch.setattr(trial, "run_job", refused)
    with pytest.raises(UserError, match=r"standard-lr0.0003-100 did not start: There is no data 'nowhere'"):
        trial.Trial(plan(), tmp_path / "t").run()
    assert not (tmp_path / "t" / "progress.jsonl").exists()  # nothing was learned about the block


def test_two_processes_do_not_carry_out_one_plan(tmp_path, monkeypatch):
    def start_another(settings, log):
        with pytest.raises(UserError, match="being written by"):
            trial.Trial(plan(), tmp_path / "t").run()
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_job", start_another)
    with pytest.raises(KeyboardInterrupt):
        trial.Trial(plan(), tmp_path / "t").run()


def test_a_job_is_stopped_with_its_trial(tmp_path, monkeypatch):
    """Ctrl-C stops it; whatever kills the trial itself, a job of start_job notices (test_sweeps.py)."""
    from polarlm.launch import processes

    class Job:
        def wait(self):
            raise KeyboardInterrupt

    started, stopped = [], []
    monkeypatch.setattr(processes, "start_job", lambda *a: started.append(a) or Job())
    monkeypatch.setattr(processes, "stop_job", stopped.append)
    with pytest.raises(KeyboardInterrupt):
        trial.run_job(["seed=1"], tmp_path / "log")
    assert started == [(["seed=1"], {}, tmp_path / "log")] and len(stopped) == 1


def test_the_budget_ends_a_trial_and_the_result_says_that_the_plan_was_not_kept(tmp_path, monkeypatch):
    FakeTrainer(monkeypatch, gap=0.05, seconds=10.0)
    trial.Trial(plan(budget_seconds=200.0), tmp_path / "t").run()
    result = json.loads((tmp_path / "t" / "result.json").read_text())
    assert result["ended"] == "the budget is spent"
    assert result["seconds"] <= 200
    assert not result["plan_kept"]


def test_the_time_of_a_longer_run_grows_by_its_training_only(tmp_path):
    started = trial.Trial(plan(), tmp_path / "t")
    done = [{"seconds": 30.0, "training": 10.0, "steps": 100}, {"seconds": 34.0, "training": 14.0, "steps": 100}]
    assert started.expected_seconds(200, done) == pytest.approx(20 + 24)
    assert started.expected_seconds(200, []) == 0


def test_a_rate_that_diverges_is_not_chosen(tmp_path, monkeypatch):
    FakeTrainer(monkeypatch, gap=0.05, fail=("standard-lr0.003-100",))
    trial.Trial(plan(), tmp_path / "t").run()
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
