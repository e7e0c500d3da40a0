"""The engine: shares out cores and GPUs, knows finished and running jobs, retries, fails fast, tells the time left."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from polarlm.errors import JobsLeft, UserError
from polarlm.jobs import engine, places
from polarlm.jobs import engine as boards
from polarlm.jobs.engine import Board, Policy, run_jobs
from polarlm.jobs.job import Ended, JobSpec
from polarlm.jobs.places import Here, share_of_cores, visible_gpus
from polarlm.runs.identity import identity_of
from polarlm.runs.lock import lock_folder


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0.001)


class Handle:
    seconds = 1.0

    def __init__(self, code, polls=1):
        self.code, self.polls, self.stopped = code, polls, False

    def poll(self):
        self.polls -= 1
        return self.code if self.polls <= 0 else None

    def stop(self):
        self.stopped = True


class FakePlace:
    """Jobs end after a few looks, with the codes that their names list."""

    waits = True

    def __init__(self, at_once=1, outlives=False, codes=None, polls=1):
        self.at_once, self.outlives, self.codes, self.polls = at_once, outlives, codes or {}, polls
        self.started, self.handles, self.most, self.queue = [], [], 0, {}

    def find(self, job):
        return self.queue.get(job.name)

    def start(self, jobs):
        for job in jobs:
            self.started.append(job.name)
            code = self.codes.get(job.name, [0]).pop(0) if self.codes.get(job.name) else 0
            self.handles.append(Handle(code, self.polls))
            if code == 0:
                folder = job.log.parent / f"run-{job.name}"
                folder.mkdir(exist_ok=True)
                (folder / "summary.json").write_text(json.dumps({"status": "finished", "val/loss": 1.0}))
                job.result.write_text(str(folder))
        self.most = max(self.most, sum(h.polls > 0 and not h.stopped for h in self.handles))
        return self.handles[-len(jobs) :]


def jobs_of(folder, *names, **options):
    return [JobSpec((f"seed={name}",), folder / f"{name}.log", name=name, **options) for name in names]


def test_so_many_jobs_run_at_a_time_and_all_are_run(tmp_path):
    place = FakePlace(at_once=2, polls=3)
    ended = run_jobs(jobs_of(tmp_path, *"abcde"), place)
    assert place.started == list("abcde") and place.most == 2
    assert [how.status for how in ended.values()] == ["finished"] * 5


def test_a_failed_job_does_not_stop_the_others_unless_asked_to(tmp_path):
    place = FakePlace(at_once=2, codes={"b": [1]}, polls=2)
    ended = run_jobs(jobs_of(tmp_path, *"abcde"), place)
    assert [how.status for how in ended.values()].count("failed") == 1 and len(place.started) == 5
    place = FakePlace(at_once=2, codes={"a": [1]}, polls=2)
    place.polls = 2
    ended = run_jobs(jobs_of(tmp_path, *"abcde"), place, policy=Policy(stop_on_failure=True))
    assert "failed" in [how.status for how in ended.values()] and place.started == ["a", "b"]


def test_running_jobs_save_and_stop_when_another_fails_fast(tmp_path):
    class OneSlow(FakePlace):
        def start(self, jobs):
            handles = super().start(jobs)
            for job, handle in zip(jobs, handles):
                handle.polls = 1000 if job.name == "slow" else 1
            return handles

    place = OneSlow(at_once=2, codes={"bad": [1]})
    ended = run_jobs(jobs_of(tmp_path, "slow", "bad", "never"), place, policy=Policy(stop_on_failure=True))
    assert place.handles[0].stopped and place.started == ["slow", "bad"] and len(ended) == 1


def test_a_killed_job_is_started_again_and_a_wrong_setting_is_not(tmp_path):
    place = FakePlace(codes={"killed": [-9, -9], "wrong": [2]})
    ended = run_jobs(jobs_of(tmp_path, "killed", "wrong"), place, policy=Policy(retries=2))
    assert place.started == ["killed"] * 3 + ["wrong"]
    assert [how.status for how in ended.values()] == ["finished", "failed"]
    place = FakePlace(codes={"killed": [-9, -9]})
    (how,) = run_jobs(jobs_of(tmp_path, "killed"), place, policy=Policy(retries=1)).values()
    assert how.status == "failed" and "killed by SIGKILL" in how.error


CONFIG = {"seed": 1, "trainer": {"max_steps": 3}, "choices": {"block": "polar"}}


def write_run(folder, status):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "summary.json").write_text(json.dumps({"status": status, "val/loss": 1.5}))


def test_a_finished_run_is_not_started_whatever_its_name(tmp_path):
    write_run(tmp_path / "by-hand", "finished")
    job = JobSpec(("seed=1",), tmp_path / "log", identity_of(CONFIG), "a", tmp_path)
    place = FakePlace()
    (how,) = run_jobs([job], place).values()
    assert place.started == [] and how.reused and how.loss == 1.5 and how.folder == tmp_path / "by-hand"


def test_a_job_that_another_process_runs_is_waited_for(tmp_path):
    write_run(tmp_path / "run", "running")
    lock = lock_folder(tmp_path / "run")
    job = JobSpec(("seed=1",), tmp_path / "log", identity_of(CONFIG), "a", tmp_path)
    place, looks = FakePlace(), []

    def finish(one):
        looks.append(one)
        if len(looks) == 3:
            write_run(tmp_path / "run", "finished")
            lock.release()
        return False

    (how,) = run_jobs([job], place, watch=finish).values()
    assert place.started == [] and how.status == "finished" and how.reused
    # One that was killed there is resumed here.
    write_run(tmp_path / "run", "running")
    lock = lock_folder(tmp_path / "run")
    run_jobs([job], place, watch=lambda one: lock.release() if not place.started else None)
    assert place.started == ["a"]


def test_on_a_cluster_the_jobs_stay_when_we_leave_and_the_same_command_finds_them(tmp_path):
    def interrupted(job):
        raise KeyboardInterrupt

    place = FakePlace(at_once=9, outlives=True, polls=100)
    with pytest.raises(JobsLeft, match="same command reconnects"):
        run_jobs(jobs_of(tmp_path, "a", "b"), place, watch=interrupted)
    assert not any(handle.stopped for handle in place.handles)
    place.queue = dict(zip("ab", place.handles))
    ended = run_jobs(jobs_of(tmp_path, "a", "b", "c"), place)
    assert place.started == ["a", "b", "c"] and len(ended) == 3
    place = FakePlace(at_once=9, outlives=True, polls=100)
    place.waits = False
    with pytest.raises(JobsLeft):
        run_jobs(jobs_of(tmp_path, "a", "b"), place)
    assert place.started == ["a", "b"]


def test_cores_are_shared_out_and_omp_num_threads_is_respected(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert share_of_cores(2, None) == (2, 4) and share_of_cores(None, 2) == (4, 2)
    assert share_of_cores(16, None) == (16, 1) and share_of_cores(None, None) == (8, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert share_of_cores(None, None) == (2, 4) and share_of_cores(2, None) == (2, 4)
    assert share_of_cores(1, None) == (1, 4) and share_of_cores(None, 1) == (8, 1)


def test_every_job_gets_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert visible_gpus() == ["2", "3", "5"]
    given = []

    class Process:
        returncode = None

        def __init__(self, overrides, environment, log, verb):
            given.append(environment.get("CUDA_VISIBLE_DEVICES"))
            self.pid = 10**9 + len(given)

        def poll(self):
            return self.returncode

    monkeypatch.setattr(places, "start_job", Process)
    place = Here(gpus=visible_gpus())
    assert place.at_once == 3
    _, second, _ = place.start(jobs_of(tmp_path, "a", "b", "c"))
    assert given == ["2", "3", "5"]
    second.process.returncode = 0
    assert second.poll() == 0
    place.start(jobs_of(tmp_path, "d"))
    assert given[-1] == "3"  # the one that is free again
    place = Here(gpus=["0", "1", "2", "3"])
    place.start(jobs_of(tmp_path, "wide", "also", devices=2))
    assert given[-2:] == ["0,1", "2,3"]
    Here(2, gpus=["0"]).start(jobs_of(tmp_path, "e"))
    assert given[-1] is None  # one GPU needs no sharing out
    assert places.gpus_for([["trainer=cpu"]]) == [] and places.gpus_for([["seed=1"]]) == ["2", "3", "5"]


def test_without_a_terminal_every_event_is_one_line(tmp_path, capsys):
    first, second, _ = jobs_of(tmp_path, "seed=1", "seed=2", "seed=3")
    with Board(3, 1) as board:
        board.started(first)
        board.ended(first, Ended("finished", 1.5, seconds=60.0))
        board.started(second)
        board.ended(second, Ended("failed", error="no such file", seconds=2.0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "job 1/3 finished, val loss 1.5000 (1:00); 2 to go, about 2:00" in lines[1]
    assert "job 2/3 failed: no such file" in lines[3]


def test_the_time_left_counts_the_waiting_jobs_at_the_pace_of_the_trained_ones(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(boards.time, "monotonic", lambda: now[0])
    jobs = jobs_of(tmp_path, *"abcdefghijkl")
    board = Board(12, 2)
    board.ended(jobs[0], Ended("finished", 1.5, reused=True))  # trained yesterday: says nothing about the pace
    board.started(jobs[1])
    board.started(jobs[2])
    assert board.seconds_left() is None and board.time_left() == "time left not known yet"
    now[0] = 9.0
    board.ended(jobs[1], Ended("finished", 1.5, seconds=9.0))
    board.ended(jobs[2], Ended("failed", error="x", seconds=0.1))
    board.started(jobs[3])
    assert board.seconds_left() == pytest.approx((8 * 9.0 + 9.0) / 2)  # eight waiting and one running, two at a time


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_killed_job_leaves_no_rank_behind(tmp_path, monkeypatch):
    """The job is killed; the process it had started (a rank, a worker) ends with it."""
    program = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr("polarlm.jobs.job.verb_command", lambda verb: ["-c", program])
    (handle,) = Here(1, 1).start(jobs_of(tmp_path, "a"))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    rank = int((tmp_path / "pid").read_text())
    handle.process.kill()
    while handle.poll() is None:
        time.sleep(0.05)
    until = time.monotonic() + 30
    status = Path(f"/proc/{rank}/status")
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path):
    pytest.importorskip("submitit", reason='needs pip install "polarlm[cluster]"')
    with pytest.raises(UserError, match="submitit refuses this launcher"):
        places.Cluster(tmp_path, {"cluster": "slurm"})
    with pytest.raises(UserError, match=r"--on slrm does not exist. Did you mean slurm"):
        places.cluster_settings("slrm", [])
    with pytest.raises(UserError, match=r"no setting 'hydra.launcher.partitoin'"):
        places.cluster_settings("slurm", ["partitoin=gpu"])
    settings = places.cluster_settings("slurm", ["partition=gpu", "timeout_min=90"])
    assert settings["partition"] == "gpu" and settings["timeout_min"] == 90 and settings["cluster"] == "slurm"


class Slow(places.ClusterJob):
    """What a node does in place of training: wait for a file, leave a finished run."""

    def __call__(self):
        result = Path(self.arguments[1]["POLARLM_RESULT"])
        while not (result.parent / "go").exists():
            time.sleep(0.05)
        (result.parent / "run").mkdir()
        (result.parent / "run" / "summary.json").write_text(json.dumps({"status": "finished", "val/loss": 2.0}))
        result.write_text(str(result.parent / "run"))
        return 0, 12.5


def test_a_job_in_the_queue_is_found_by_the_next_command_and_submitted_once(tmp_path, monkeypatch):
    """Through submitit's local executor, whose processes outlive the one that submits."""
    pytest.importorskip("submitit", reason='needs pip install "polarlm[cluster]"')
    monkeypatch.setattr(places, "ClusterJob", Slow)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    settings = {"cluster": "local", "timeout_min": 5}
    (job,) = jobs_of(tmp_path, "a", identity="abc")
    with pytest.raises(JobsLeft):
        run_jobs([job], places.Cluster(tmp_path / "queue", {**settings, "wait": False}))
    again = places.Cluster(tmp_path / "queue", settings)
    handle = again.find(job)
    assert handle is not None and handle.poll() is None
    (tmp_path / "go").write_text("")
    (how,) = run_jobs([job], again).values()
    assert (how.status, how.loss, how.seconds) == ("finished", 2.0, 12.5)
    assert len(list((tmp_path / "queue" / ".submitit").glob("[0-9]*"))) == 1
    assert again.find(job) is None  # it is over


def test_a_job_whose_time_on_the_cluster_is_over_saves_and_is_queued_again(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason='needs pip install "polarlm[cluster]"')
    program = "import pathlib, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(143))\n"
    program += "pathlib.Path(sys.argv[1]).write_text('on')\ntime.sleep(600)"
    monkeypatch.setattr("polarlm.jobs.job.verb_command", lambda verb: ["-c", program])
    work = places.ClusterJob([str(tmp_path / "on")], {}, tmp_path / "log", "train")
    delayed = []

    def usr2(number, frame):  # as submitit does
        os.killpg(work._process.pid, signal.SIGUSR2)  # SLURM signals every process of the job
        time.sleep(0.5)
        assert work._process.poll() is None
        delayed.append(work.checkpoint())

    before = signal.signal(signal.SIGUSR2, usr2)
    try:
        sender = threading.Thread(target=_when, args=(tmp_path / "on", lambda: os.kill(os.getpid(), signal.SIGUSR2)))
        sender.start()
        code, _ = work()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    again = delayed[0].function
    assert code == 143 and again.arguments == work.arguments and again.seconds > 0


def _when(file, act):
    while not file.exists():
        time.sleep(0.05)
    act()
