"""A run folder appears whole, has one writer, and goes on only with what it began."""

import json
import multiprocessing
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from polarlm.errors import UserError
from polarlm.runs.folder import open_run
from polarlm.runs.identity import refuse_secrets
from polarlm.runs.lock import PATIENCE_VARIABLE, boot_id, lock_folder


class Tokenizer:
    def save(self, folder):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")


def corpus(content="abc"):
    described = {"name": "x", "fingerprint": "f", "content": content}
    return SimpleNamespace(tokenizer=Tokenizer(), describe=lambda: described)


@pytest.fixture
def config(tmp_path):
    return {
        "seed": 1, "name": "mine", "group": None, "resume": "auto", "runs_dir": str(tmp_path / "runs"),
        "trainer": {"max_steps": 5, "devices": 1}, "choices": {"block": "polar", "model": "nano", "data": "pydocs"},
    }  # fmt: skip


def test_a_new_folder_is_complete_when_it_appears(config, tmp_path):
    folder, lock, again = open_run(config, corpus(), 10)
    assert (folder, again) == (tmp_path / "runs" / "mine", False)
    assert {"config.yaml", "summary.json", "environment.json", "corpus.json", "tokenizer"} <= set(os.listdir(folder))
    assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    assert os.listdir(tmp_path / "runs") == ["mine"]
    lock.release()


def test_a_failure_while_opening_leaves_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setattr("polarlm.runs.folder.environment", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_run(config, corpus(), 10)
    assert os.listdir(tmp_path / "runs") == []


def test_what_a_killed_process_began_to_build_is_removed(config, tmp_path):
    dead = multiprocessing.get_context("fork").Process(target=lambda: None)
    dead.start()
    dead.join()
    left = tmp_path / "runs" / f".mine.{dead.pid}.new"
    left.mkdir(parents=True)
    open_run(config, corpus(), 10)[1].release()
    assert os.listdir(tmp_path / "runs") == ["mine"]


def test_what_a_killed_process_with_our_own_number_left_is_no_obstacle(config, tmp_path):
    """In a container the first process has the same number every time."""
    (tmp_path / "runs" / f".mine.{os.getpid()}.new").mkdir(parents=True)
    (tmp_path / "runs" / f".mine.{os.getpid()}-0.new").mkdir()
    open_run(config, corpus(), 10)[1].release()
    assert (tmp_path / "runs" / "mine" / "config.yaml").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_a_folder_is_one_sentence(config, tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.*cannot be written.*runs_dir="):
        open_run({**config, "runs_dir": str(tmp_path / place)}, corpus(), 10)


def test_one_writer_per_folder_and_the_other_is_told_who_it_is(config):
    _, lock, _ = open_run(config, corpus(), 10)
    with pytest.raises(UserError, match=rf"process {os.getpid()} on"):
        open_run(config, corpus(), 10)
    lock.release()
    _, lock, again = open_run(config, corpus(), 10)
    assert again
    lock.release()


def _hold(folder, ready):
    kept = lock_folder(folder)  # an object that goes away gives the lock back
    ready.set()
    time.sleep(600)
    kept.release()


def test_the_lock_of_a_killed_process_is_free_also_to_who_waits_for_it(config, monkeypatch):
    folder, lock, _ = open_run(config, corpus(), 10)
    lock.release()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(folder, ready))
    other.start()
    assert ready.wait(500)
    with pytest.raises(UserError, match=rf"process {other.pid} on"):
        open_run(config, corpus(), 10)
    # A job of a sweep that was killed and started again at once waits for the old one, which is about to end.
    monkeypatch.setenv(PATIENCE_VARIABLE, "30")
    threading.Timer(0.5, other.kill).start()
    open_run(config, corpus(), 10)[1].release()
    other.join()


def test_another_machine_counts_as_alive_until_it_is_silent_for_long(config):
    folder, lock, _ = open_run(config, corpus(), 10)
    lock.release()
    owner = {"pid": 1, "host": socket.gethostname() + "-other", "since": "yesterday"}
    (folder / "run.lock").write_text(json.dumps(owner))
    with pytest.raises(UserError, match="other, since yesterday"):
        open_run(config, corpus(), 10)
    os.utime(folder / "run.lock", (time.time() - 3600,) * 2)
    open_run(config, corpus(), 10)[1].release()


def test_a_container_that_starts_again_under_another_name_goes_on(config):
    """Within one boot the kernel's lock decides, whatever the machine is called."""
    folder, lock, _ = open_run(config, corpus(), 10)
    lock.release()
    other = {"pid": 1, "host": socket.gethostname() + "-other", "since": "yesterday"}
    (folder / "run.lock").write_text(json.dumps({**other, "boot": boot_id()}))
    assert open_run(config, corpus(), 10)[2]


def test_force_overrules_another_machine_and_no_living_process(config):
    folder, lock, _ = open_run(config, corpus(), 10)
    with pytest.raises(UserError, match="is being written by process") as caught:
        open_run({**config, "resume": "force"}, corpus(), 10)
    assert "resume=force" not in str(caught.value)
    lock.release()
    other = {"pid": 1, "host": socket.gethostname() + "-other", "boot": "another", "since": "yesterday"}
    (folder / "run.lock").write_text(json.dumps(other))
    os.utime(folder / "run.lock", (time.time() + 86400,) * 2)  # its clock was ahead
    with pytest.raises(UserError, match=r"other, since yesterday.*resume=force"):
        open_run(config, corpus(), 10)
    assert open_run({**config, "resume": "force"}, corpus(), 10)[2]


def _race(config, results, all_tried):
    try:
        folder, _, again = open_run(config, corpus(), 10)
        results.put((folder.name, again))
        all_tried.wait()
    except UserError:
        results.put(("refused", False))
    results.close()
    results.join_thread()
    os._exit(0)


def test_of_many_that_start_at_once_one_wins(config, tmp_path):
    context = multiprocessing.get_context("fork")
    results, all_tried = context.Queue(), context.Event()
    racers = [context.Process(target=_race, args=(config, results, all_tried)) for _ in range(6)]
    for racer in racers:
        racer.start()
    outcomes = sorted(results.get(timeout=500) for _ in racers)
    all_tried.set()
    for racer in racers:
        racer.join()
    assert outcomes.count(("mine", False)) == 1 and outcomes.count(("refused", False)) == 5
    assert [name for name in os.listdir(tmp_path / "runs") if not name.startswith(".")] == ["mine"]


def test_changed_data_is_refused_and_a_changed_version_is_told_and_recorded(config, capsys):
    folder, lock, _ = open_run(config, corpus(), 10)
    lock.release()
    with pytest.raises(UserError, match=r"corpus or its tokenizer has changed"):
        open_run(config, corpus("other"), 10)
    environment = json.loads((folder / "environment.json").read_text())
    environment["versions"]["torch"] = "1.0.0"
    (folder / "environment.json").write_text(json.dumps(environment))
    open_run(config, corpus(), 10)[1].release()
    assert "torch 1.0.0 →" in capsys.readouterr().err
    now = json.loads((folder / "environment.json").read_text())
    assert now["versions"]["torch"] != "1.0.0" and now["earlier"][0]["versions"]["torch"] == "1.0.0"


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "../x", "a\nb", "a\x1b[31mb", ""])
def test_names_that_are_not_one_visible_folder_are_refused(config, name, tmp_path):
    if name == "":
        return  # no name: one is made
    with pytest.raises(UserError, match="folder name"):
        open_run({**config, "name": name}, corpus(), 10)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["api_key", "apikey", "password", "auth_token", "secret"])
def test_secrets_are_refused(key):
    with pytest.raises(UserError, match=f"logger.{key}"):
        refuse_secrets({"logger": {"kind": "wandb", key: "hunter2"}})
    refuse_secrets({"data": {"eval_tokens": 3}, "logger": {"project": "x"}})
