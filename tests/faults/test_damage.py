"""Damage and bad circumstances, end to end: one sentence, nothing lost."""

from __future__ import annotations

import errno
import json
import os
from unittest import mock

import pytest
import torch

from polarlm.errors import UserError
from polarlm.runs.checkpoints import give_name, load_verified, step_files
from polarlm.runs.restore import restore_run
from polarlm.training.loop import train_run
from tests.training.tiny_jobs import composed

OPTIONS = (
    "trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.log_every=2", "sample.tokens=5", "name=run",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_peak(monkeypatch):
    monkeypatch.setattr("polarlm.training.hardware.measured_peak", lambda **_: 1e9)


def config(place, *options):
    return {**composed(place, *OPTIONS, *options), "group": None}


def flip(path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def fill_disk(monkeypatch, name: str) -> None:
    """Refuse to flush the files whose path holds `name`, as a full disk does for what was only buffered."""
    real = os.fsync

    def full(file):
        if name in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", full)


def test_a_flipped_bit_in_the_weights_is_noticed_and_the_checkpoint_is_used(tmp_path, capsys):
    folder = train_run(config(tmp_path)).folder
    path = folder / "checkpoints" / "model.safetensors"
    before = restore_run(folder).model.state_dict()
    flip(path, path.stat().st_size - 1000)
    with pytest.raises(UserError, match="checksum is wrong"):
        restore_run(path)
    restored = restore_run(folder)
    assert restored.weights.name.startswith(("step_", "last"))
    assert "checksum is wrong" in capsys.readouterr().err
    after = restored.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(tmp_path, capsys):
    done = train_run(config(tmp_path))
    expected = (done.folder / "checkpoints" / "model.safetensors").read_bytes()
    summary = json.loads((done.folder / "summary.json").read_text())
    (done.folder / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    newest = step_files(done.folder / "checkpoints")[0]
    flip(newest, newest.stat().st_size // 2)
    again = train_run(config(tmp_path))
    assert again.folder == done.folder and "is damaged" in capsys.readouterr().err
    assert (done.folder / "checkpoints" / "model.safetensors").read_bytes() == expected


@pytest.fixture
def one_process_group():
    """FSDP in this process: neither its group nor what Lightning writes into the environment stays."""
    import torch.distributed as dist

    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


SHARDED = ("trainer=fsdp", "trainer.devices=1", "trainer.accelerator=cpu")


@pytest.mark.parametrize("options", [(), SHARDED], ids=["whole", "sharded"])
@pytest.mark.usefixtures("one_process_group")
def test_killed_on_the_way_back_from_a_damaged_last_checkpoint(tmp_path, monkeypatch, options):
    """Trained again and saved, but killed before that was called the last: the last one is not the damaged one."""
    done = train_run(config(tmp_path, *options)).folder / "checkpoints"
    expected = (done / "model.safetensors").read_bytes()
    newest = step_files(done)[0]
    damaged = next((done / "shards" / newest.stem).glob("optimiser_*")) if options else newest
    flip(damaged, damaged.stat().st_size * 3 // 4)
    (done.parent / "summary.json").write_text('{"status": "failed"}')

    class Killed(Exception):
        pass

    def die(source, name):
        if source.name == newest.name and name.name == "last.ckpt":
            raise Killed
        give_name(source, name)

    monkeypatch.setattr("polarlm.training.checkpointing.give_name", die)
    with pytest.raises(Killed):
        train_run(config(tmp_path, *options))
    monkeypatch.undo()
    train_run(config(tmp_path, *options))
    for name in ("last.ckpt", "best.ckpt", newest.name):
        assert load_verified(done / name)["global_step"] == 6
    assert (done / "model.safetensors").read_bytes() == expected


def test_a_full_disk_names_the_file_leaves_no_temporary_one_and_the_run_goes_on(tmp_path, monkeypatch):
    fill_disk(monkeypatch, ".step_00000004.ckpt")
    with pytest.raises(UserError, match=r"disk is full.*step_00000004\.ckpt"):
        train_run(config(tmp_path))
    folder = tmp_path / "runs" / "run"
    assert [p.name for p in step_files(folder / "checkpoints")] == ["step_00000002.ckpt"]
    assert not list(folder.rglob("*.tmp"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    assert train_run(config(tmp_path)).summary["status"] == "finished"


@pytest.mark.usefixtures("one_process_group")
def test_shards_that_do_not_fit_on_the_disk_leave_the_checkpoint_before_them(tmp_path, monkeypatch):
    sharded = config(tmp_path, *SHARDED)
    folder = tmp_path / "runs" / "run"
    fill_disk(monkeypatch, "step_00000004/.optimiser_00000")
    with pytest.raises(UserError, match=r"disk is full.*step_00000004/optimiser_00000\.safetensors"):
        train_run(sharded)
    assert [p.name for p in (folder / "checkpoints" / "shards").iterdir()] == ["step_00000002"]
    assert restore_run(folder).weights.name == "step_00000002.ckpt"
    monkeypatch.undo()
    assert train_run(sharded).summary["status"] == "finished"


def test_a_run_can_begin_with_the_weights_of_another(tmp_path):
    first = train_run(config(tmp_path))
    second = train_run(config(tmp_path, "name=second", f"init_from={first.folder}", "optim.lr=1e-30"))
    a, b = (restore_run(run.folder).model.state_dict() for run in (first, second))
    assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)
    with pytest.raises(UserError, match="do not fit"):
        train_run(config(tmp_path, "name=third", f"init_from={first.folder}", "model.d_model=32"))
    assert not (tmp_path / "runs" / "third").exists()


def test_changed_data_is_not_trained_on(tmp_path):
    done = train_run(config(tmp_path))
    summary = json.loads((done.folder / "summary.json").read_text())
    (done.folder / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("river", "ocean"))
    with pytest.raises(UserError, match="corpus or its tokenizer has changed"):
        train_run(config(tmp_path))


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_a_damaged_file_of_an_unfinished_run_is_named(tmp_path, name):
    done = train_run(config(tmp_path))
    (done.folder / "summary.json").write_text('{"status": "failed"}')
    (done.folder / name).write_text('{"a": ')
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        train_run(config(tmp_path))
