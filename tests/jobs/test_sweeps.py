"""Sweeps: what makes two jobs one, what is already done, what the launcher tells."""

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hydra_plugins.polarlm_local import LocalLauncher
from polarlm.errors import UserError
from polarlm.jobs.job import JobSpec, outcome_of, shown, varying
from polarlm.jobs.places import Here
from polarlm.jobs.sweep import Sweep, show_status
from polarlm.launch.overrides import compose, config_loader, plan_jobs
from polarlm.runs.identity import find_finished, identity_of, write_plan


def config(*overrides: str) -> dict:
    (job,) = plan_jobs(config_loader(), "train", list(overrides), multirun=False).jobs
    return job.config


@pytest.fixture(scope="module")
def base():
    return config()


@pytest.mark.parametrize(
    "change",
    [
        "name=x", "group=g", "trainer.log_every=1", "trainer.val_every=7", "trainer.checkpoint_every=2",
        "runs_dir=elsewhere", "cache_dir=elsewhere", "logger=none", "diagnostics=off", "sample.tokens=3",
    ],
)  # fmt: skip
def test_what_does_not_affect_numbers_does_not_make_another_run(base, change):
    assert identity_of(config(change)) == identity_of(base)


@pytest.mark.parametrize("change", ["seed=2", "optim.lr=1e-4", "block=polar", "trainer.max_steps=3", "model.n_layer=3"])
def test_what_affects_numbers_makes_another_run(base, change):
    assert identity_of(config(change)) != identity_of(base)


def test_a_run_made_by_hand_is_the_sweeps_job(base):
    named = copy.deepcopy(base)
    named["choices"]["sweep"] = "blocks"
    assert identity_of(named) == identity_of(base)


def write_run(folder, settings, status, loss=1.5):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "summary.json").write_text(json.dumps({"status": status, "val/loss": loss}))


def test_only_a_finished_run_with_the_same_numbers_is_taken_for_the_job(tmp_path, base):
    settings = {**base, "runs_dir": str(tmp_path)}
    assert find_finished(settings) is None
    write_run(tmp_path / "half", settings, "interrupted")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_text("{")
    assert find_finished(settings) is None
    write_run(tmp_path / "mine", {**settings, "group": "other"}, "finished")
    assert find_finished(settings) == tmp_path / "mine"
    assert find_finished({**settings, "seed": 5}) is None


def test_status_names_finished_and_waiting_jobs(tmp_path, base, capsys):
    jobs = [{**base, "seed": seed, "runs_dir": str(tmp_path)} for seed in (1, 2)]
    rows = [{"overrides": [f"seed={job['seed']}", "optim.lr=1"], "identity": identity_of(job)} for job in jobs]
    write_plan(tmp_path, "pair", ["seed"], rows)
    write_run(tmp_path / "one", jobs[0], "finished", 1.25)
    options = argparse.Namespace(group="pair", runs=str(tmp_path))
    assert show_status(options) == 1
    output = capsys.readouterr().out
    assert "1 finished, 1 waiting" in output and "val loss 1.2500" in output and "optim.lr" not in output
    write_run(tmp_path / "two", jobs[1], "finished")
    assert show_status(options) == 0
    with pytest.raises(UserError, match="Did you mean pair"):
        show_status(argparse.Namespace(group="pairr", runs=str(tmp_path)))


def test_status_tells_killed_running_and_refused_jobs_apart(tmp_path, base, capsys):
    import json
    import socket
    import subprocess
    import sys

    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    jobs = [{**base, "seed": seed, "runs_dir": str(tmp_path)} for seed in (1, 2)]
    rows = [{"overrides": [f"seed={job['seed']}"], "identity": identity_of(job)} for job in jobs]
    write_plan(
        tmp_path, "pair", ["seed"], [*rows, {"overrides": ["seed=-1"], "identity": "", "refused": "seed=-1 is no"}]
    )
    for name, job, pid in (("one", jobs[0], over.pid), ("two", jobs[1], os.getpid())):
        write_run(tmp_path / name, job, "running")
        (tmp_path / name / "run.lock").write_text(
            json.dumps({"pid": pid, "host": socket.gethostname(), "since": "now"})
        )
    assert show_status(argparse.Namespace(group="pair", runs=str(tmp_path))) == 1
    output = capsys.readouterr().out
    assert "1 killed, 1 running, 1 refused" in output and "seed=-1 is no" in output


def test_status_shows_control_characters_of_a_plan_and_its_runs_as_text(tmp_path, base, capsys):
    job = {**base, "runs_dir": str(tmp_path)}
    rows = [{"overrides": ["seed=\x1b]0;owned\x07"], "identity": identity_of(job)}]
    rows.append({"overrides": ["seed=2"], "identity": "", "refused": "no \x1b[31m"})
    write_plan(tmp_path, "pair", ["seed"], rows)
    plan = tmp_path / ".sweeps" / "pair" / "plan.json"
    plan.write_text(plan.read_text().replace('"group": "pair"', '"group": "pair\\u001b[2J"'))
    write_run(tmp_path / "one", job, "failed\x1b[31m", None)
    show_status(argparse.Namespace(group="pair", runs=str(tmp_path)))
    output = capsys.readouterr().out
    assert "owned" in output and "2J" in output and output.replace("\n", "").isprintable()


def test_only_varying_keys_are_shown():
    jobs = [["block=polar", "seed=1", "optim.lr=1"], ["block=polar", "seed=2", "optim.lr=1"]]
    assert varying(jobs) == ["seed"] and shown(jobs[1], ["seed"]) == "seed=2"


def test_every_sweep_goes_through_the_engine_and_shares_out_the_cores(monkeypatch):
    """Also the default launcher, which runs one job after the other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    jobs = [["trainer=cpu", f"seed={seed}"] for seed in (1, 2, 3)]
    for typed, at_once, threads in (
        ([], 1, 8),
        (["hydra/launcher=local"], 3, 2),
        (["hydra/launcher=local", "hydra.launcher.jobs=2"], 2, 4),
    ):
        chosen = compose(config_loader(), "train", typed).hydra.launcher
        assert str(chosen["_target_"]) == "hydra_plugins.polarlm_local.LocalLauncher"
        place = LocalLauncher(chosen["jobs"], chosen["threads"]).place(Path(), jobs)
        assert (place.at_once, place.threads) == (at_once, threads)


@pytest.mark.parametrize(("fail_fast", "begun"), [(False, ["1", "2"]), (True, ["1"])])
def test_a_failed_batch_ends_a_sweep_only_when_failing_fast(tmp_path, monkeypatch, fail_fast, begun):
    from polarlm.jobs import sweep

    class Failing(Here):
        def start(self, jobs):
            started.extend(job.overrides[0].partition("=")[2] for job in jobs)
            return [Over() for _ in jobs]

    class Over:
        seconds = 0.0

        def poll(self):
            return 1

    started, current = [], Sweep(group="pair", varied=["optim.lr"], stop_on_failure=fail_fast)
    monkeypatch.setattr(sweep, "current", current)
    launcher = LocalLauncher(1)
    launcher.config = compose(config_loader(), "train", [f"hydra.sweep.dir={tmp_path}"])
    monkeypatch.setattr(launcher, "place", lambda folder, jobs: Failing(1))
    returned = [launcher.launch([[f"seed={seed}", "optim.lr=1"]], seed - 1) for seed in (1, 2)]
    assert started == begun and all(done.return_value != done.return_value for (done,) in returned[: len(begun)])
    assert current.ended[0][1] == "optim.lr=1"  # told by what the whole sweep varies, not by its own batch
    assert str(sweep.failed_jobs()).startswith(f"{len(begun)} of {len(begun)} jobs failed")
    assert (tmp_path / "pair" / "logs").is_dir()  # of this sweep alone: another one may run beside it


def test_the_estimate_of_a_sweep_counts_the_jobs_that_run_at_a_time(monkeypatch, capsys):
    from polarlm.jobs import sweep

    monkeypatch.setattr("polarlm.jobs.estimate.seconds_of_jobs", lambda configs, threads: [60.0] * len(configs))
    sweep.print_estimate([{}] * 4, Here(2, 1))
    assert "about 2:00 of training, 2 at a time" in capsys.readouterr().err


def test_the_command_that_compares_a_sweep_is_printed_at_its_end(tmp_path, monkeypatch, capsys):
    from polarlm.jobs import sweep

    monkeypatch.setattr(sys, "argv", ["train.py"])
    ended = Sweep(runs_dir=str(tmp_path / "my runs"), group="pair")
    monkeypatch.setattr(sweep, "current", ended)
    ended.note("seed=1", None, "no")
    sweep.print_sweep_summary()
    assert "compare" not in capsys.readouterr().err  # nothing to compare
    ended.note("seed=2", 1.5, None)
    sweep.print_sweep_summary()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"python -m polarlm compare '{tmp_path}/my runs' --sweep pair --out report.html")


def test_a_wrong_number_of_jobs_is_one_sentence():
    with pytest.raises(UserError, match=r"hydra\.launcher\.jobs=0"):
        LocalLauncher(jobs=0)


CHILD = """
import sys, time
sys.argv = ["train.py"]
import polarlm.jobs.job as jobs
sleeper = "import time; from polarlm.jobs.job import watch_parent; watch_parent(); time.sleep(600)"
jobs.verb_command = lambda verb: ["-c", sleeper]
job = jobs.start_job([], {})
print(job.pid, flush=True)
time.sleep(600)
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        # In a container nobody may be there to bury it.
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        (-9, "step 3", "killed by SIGKILL, which is also what a machine without memory does; the same command"),
        (-15, "", "killed by SIGTERM; the same command resumes it (log:"),
        (-200, "", "killed by signal 200; the same command"),
        (3, "", "ended with code 3 (log:"),
        (2, "error: lr must be above 0", "lr must be above 0 (log:"),
    ],
)
def test_a_job_that_ended_badly_says_why_in_words(tmp_path, code, log, words):
    job = JobSpec((), tmp_path / "000.log")
    job.log.write_text(log)
    ended = outcome_of(job, code)
    assert ended.status == "failed" and ended.error.startswith(words)


RANK = """
import os, subprocess, sys, time
sleeper = "import time; from polarlm.jobs.job import watch_parent; watch_parent(); time.sleep(600)"
rank = subprocess.Popen([sys.executable, "-c", sleeper], env={**os.environ, "LOCAL_RANK": "1", "POLARLM_RUN_DIR": "x"})
print(rank.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("started", [CHILD, RANK], ids=["job", "rank"])
def test_a_job_does_not_outlive_a_killed_parent(started):
    """The job of a sweep; the second rank of a run whose first rank is killed."""
    parent = subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE, text=True)
    job = int(parent.stdout.readline())
    time.sleep(2)
    assert is_alive(job)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 300
    while (lives := is_alive(job)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if lives:
        os.kill(job, signal.SIGKILL)
    assert not lives
