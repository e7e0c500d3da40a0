"""`polarlm tune`: Optuna proposes, runs that fall behind are stopped, a killed search goes on."""

import argparse
import json
import math
from pathlib import Path
from typing import ClassVar

import pytest

from polarlm.errors import UserError
from polarlm.launch import processes, tune
from polarlm.runs.identity import default_name
from polarlm.runs.sweeps import RESULT_VARIABLE

optuna = pytest.importorskip("optuna", reason='needs pip install "polarlm[search]"')


class FakeJob:
    """Stands in for `train`: three validations, one at a time; the loss grows with the distance to a rate of 0.01."""

    kept: ClassVar[list["FakeJob"]] = []
    code = 0

    def __init__(self, overrides, environment, log):
        self.rate = next(float(o.split("=")[1]) for o in overrides if o.startswith("optim.lr="))
        options = argparse.Namespace(settings=[o for o in overrides if not o.startswith(("optim.lr", "group"))])
        options.key = "optim.lr"
        config = tune.trial_config(options, self.rate)
        self.folder = Path(config["runs_dir"]) / default_name(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.result, self.rows, self.returncode = Path(environment[RESULT_VARIABLE]), 0, None
        self.loss = 2 + abs(math.log10(self.rate) + 2)
        FakeJob.kept.append(self)

    def poll(self):
        if self.rows == 3 and self.returncode is None:
            self.returncode = self.code
            if not self.code:
                (self.folder / "summary.json").write_text(json.dumps({"val/loss": self.loss}))
                self.result.write_text(str(self.folder))
        if self.returncode is None:
            self.rows += 1
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 10 * self.rows, "val/loss": self.loss + 1 / self.rows}) + "\n")
        return self.returncode


def stop(job):
    job.returncode = -15 if job.returncode is None else job.returncode


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "start_job", FakeJob)
    monkeypatch.setattr(processes, "stop_job", stop)
    monkeypatch.setattr(tune, "POLL", 0.0)
    monkeypatch.setattr(FakeJob, "kept", [])
    monkeypatch.setattr(FakeJob, "code", 0)
    parser = argparse.ArgumentParser()
    tune.add_parser(parser.add_subparsers())

    def run(*words):
        options = parser.parse_args(["tune", f"runs_dir={tmp_path}", "logger=none", *words])
        return options.run(options)

    run.folder = tmp_path / ".sweeps" / "tune-lr-standard"
    return run


RANGE = ("--low", "1e-4", "--high", "1")


def test_the_best_rate_is_found_and_bad_runs_are_stopped_early(search, capsys):
    assert search(*RANGE, "--trials", "12") == 0
    output = capsys.readouterr()
    best = min(FakeJob.kept, key=lambda job: job.loss)
    assert f"best: optim.lr={best.rate:.6g}, val loss {best.loss:.4f}" in output.out
    stopped = [job for job in FakeJob.kept if job.returncode == -15]
    assert len(FakeJob.kept) == 12 and 0 < len(stopped) < 9
    assert output.err.count("behind the others") == len(stopped)
    assert min(job.loss for job in stopped) > best.loss
    assert (search.folder / "study.journal").exists()


def test_the_same_command_adds_only_what_is_missing(search):
    search(*RANGE, "--trials", "2")
    search(*RANGE, "--trials", "3")
    assert len(FakeJob.kept) == 3
    search(*RANGE, "--trials", "3")
    assert len(FakeJob.kept) == 3


def test_a_killed_search_trains_its_last_rate_again(search, monkeypatch):
    def killed(job):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeJob, "poll", killed)
        with pytest.raises(KeyboardInterrupt):
            search(*RANGE, "--trials", "1")
    search(*RANGE, "--trials", "1")
    first, again = FakeJob.kept
    assert first.rate == again.rate and again.folder == first.folder  # the run's own folder: it is continued


def test_a_failed_run_ends_the_search_and_names_its_log(search, monkeypatch):
    monkeypatch.setattr(FakeJob, "code", 1)
    with pytest.raises(UserError, match=r"trial 0: optim.lr=\S+ failed; its log says why: .*trial-000.log"):
        search(*RANGE)


@pytest.mark.parametrize(
    "words", [("--low", "0", "--high", "1"), ("--low", "2", "--high", "1"), (*RANGE, "--trials", "0")]
)
def test_a_range_that_makes_no_sense_is_refused(search, words):
    with pytest.raises(UserError, match="--low must be above 0"):
        search(*words)


def test_a_search_is_not_continued_with_other_settings(search):
    search(*RANGE, "--trials", "1")
    with pytest.raises(UserError, match=r"trainer.max_steps: \d+ → 7.*--group"):
        search("trainer.max_steps=7", *RANGE, "--trials", "2")
    with pytest.raises(UserError, match=r"searched: optim.lr → optim.weight_decay"):
        search("--group", "tune-lr-standard", "--key", "optim.weight_decay", *RANGE, "--trials", "2")
    # The range, and what is only shown, may change.
    search("trainer.log_every=5", "--low", "1e-3", "--high", "1", "--trials", "2")
    assert len(FakeJob.kept) == 2


def test_a_name_for_all_trials_is_refused(search):
    with pytest.raises(UserError, match="name="):
        search("name=mine", *RANGE)
