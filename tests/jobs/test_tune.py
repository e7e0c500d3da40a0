"""`polarlm tune`: Optuna proposes, runs that fall behind are stopped, a killed search goes on."""

import argparse
import json
import math
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from polarlm.errors import UserError
from polarlm.jobs import engine, places, tune
from polarlm.runs.identity import RESULT_VARIABLE, default_name

optuna = pytest.importorskip("optuna", reason='needs pip install "polarlm[search]"')


class FakeJob:
    """Stands in for `train`: three validations, one at a time; the loss grows with the distance to a rate of 0.01."""

    kept: ClassVar[list["FakeJob"]] = []
    code = 0

    def __init__(self, overrides, environment, log, verb):
        self.rate = next(float(o.split("=")[1]) for o in overrides if o.startswith("optim.lr="))
        options = argparse.Namespace(settings=[o for o in overrides if not o.startswith(("optim.lr", "group"))])
        options.key = "optim.lr"
        config = tune.trial_config(options, self.rate)
        self.folder = Path(config["runs_dir"]) / default_name(config)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        (self.folder / "metrics.jsonl").write_text("")
        self.result, self.rows, self.returncode, self.pid = Path(environment[RESULT_VARIABLE]), 0, None, None
        self.loss = 2 + abs(math.log10(self.rate) + 2)
        FakeJob.kept.append(self)

    def poll(self):
        if self.rows == 3 and self.returncode is None:
            self.returncode = self.code
            if not self.code:
                summary = {"status": "finished", "val/loss": self.loss}
                (self.folder / "summary.json").write_text(json.dumps(summary))
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
    monkeypatch.setattr(places, "start_job", FakeJob)
    monkeypatch.setattr(places, "stop_job", stop)
    monkeypatch.setattr(places, "end_group", lambda pid: None)
    monkeypatch.setattr(engine, "POLL", 0.0)
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
    assert "job 1/12 finished" in output.err and "11 to go, about 0:00" in output.err and "job 12/12" in output.err
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


@pytest.mark.parametrize("batch", [1, 3])
def test_a_search_in_several_sittings_proposes_what_one_sitting_would(search, monkeypatch, tmp_path, batch):
    def sit(place, trials):
        search(f"runs_dir={tmp_path / place}", *RANGE, "--jobs", str(batch), "--trials", str(trials))

    sit("one", 14)
    whole = [(job.rate, job.rows) for job in FakeJob.kept]
    FakeJob.kept.clear()
    sit("many", 3)
    poll = FakeJob.poll
    for killed_after in (1, 2):  # and killed twice in the middle of a run

        def killed(job, looks=killed_after):
            if job.rows == looks:
                raise KeyboardInterrupt
            return poll(job)

        with monkeypatch.context() as patch:
            patch.setattr(FakeJob, "poll", killed)
            with pytest.raises(KeyboardInterrupt):
                sit("many", 14)
    sit("many", 11)  # in the middle of a batch of three
    sit("many", 14)
    last = {job.rate: job.rows for job in FakeJob.kept}
    assert len(last) == 14 and sorted(last.items()) == sorted(whole)


def test_values_are_tried_side_by_side(search, monkeypatch):
    most = []
    poll = FakeJob.poll
    counted = lambda job: most.append(sum(j.returncode is None for j in FakeJob.kept)) or poll(job)  # noqa: E731
    monkeypatch.setattr(FakeJob, "poll", counted)
    search(*RANGE, "--jobs", "3", "--trials", "6")
    assert max(most) == 3 and len(FakeJob.kept) == 6
