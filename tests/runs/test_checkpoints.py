"""Checkpoints: safe to load, replaced in one step, never trusted when a bit is wrong."""

import builtins
import errno
import io
import os
import pickle
import random
import zipfile

import pytest
import torch

from polarlm.errors import UserError
from polarlm.runs.checkpoints import (
    DamagedCheckpoint,
    SafeCheckpointIO,
    give_name,
    load_checkpoint,
    load_verified,
    newest_usable,
    step_file,
    verify_checksums,
)


def state(step: int = 1) -> dict:
    weights = {"model.a": torch.full((50, 40), float(step)), "model.b": torch.arange(7)}
    return {"global_step": step, "state_dict": weights, "optimizer_states": [{"state": {0: {"m": torch.ones(9)}}}]}


def test_a_checkpoint_that_carries_code_is_refused_and_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(UserError, match="more than tensors"):
        load_verified(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError):
        load_verified(path)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_whose_records_are_compressed_is_refused_before_they_are_unpacked(tmp_path):
    path, packed = tmp_path / "plain.ckpt", tmp_path / "packed.ckpt"
    torch.save({"x": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    assert packed.stat().st_size < 1 << 16 and torch.load(packed, weights_only=True)["x"].numel() == 1 << 20
    for load in (load_checkpoint, load_verified, verify_checksums):
        load(path)
        with pytest.raises(DamagedCheckpoint, match=r"packed\.ckpt .* would expand to 4\.2 MB"):
            load(packed)


def test_saving_replaces_in_one_step_and_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    io = SafeCheckpointIO()
    io.save_checkpoint({"x": torch.ones(3)}, path)
    with pytest.raises(UserError):  # what can't be read back safely never becomes the checkpoint
        io.save_checkpoint({"x": object}, path)
    assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_damaged_and_missing_files_give_one_sentence(tmp_path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(UserError, match="no checkpoint"):
        load_verified(path)
    SafeCheckpointIO().save_checkpoint({"x": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedCheckpoint, match="can't be loaded"):
        load_verified(path)


def test_a_flipped_bit_anywhere_in_the_content_is_noticed(tmp_path):
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(state(), path)
    whole, numbers = path.read_bytes(), random.Random(7)
    begin = whole.index(torch.full((4,), 1.0).numpy().tobytes())
    for _ in range(25):
        place = numbers.randrange(begin, begin + 8000)
        changed = bytearray(whole)
        changed[place] ^= 1 << numbers.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            load_verified(path)


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(state(), path)
    whole, numbers = path.read_bytes(), random.Random(8)
    for _ in range(60):
        changed = bytearray(whole)
        changed[numbers.randrange(len(whole))] ^= 1 << numbers.randrange(8)
        path.write_bytes(changed)
        try:
            loaded = load_verified(path)
        except DamagedCheckpoint:
            continue
        assert torch.equal(loaded["state_dict"]["model.a"], state()["state_dict"]["model.a"])
        assert loaded["global_step"] == 1


@pytest.mark.parametrize("where", ["state_dict", "optimizer_states"])
def test_numbers_that_are_not_finite_are_neither_saved_nor_loaded(tmp_path, where):
    bad = state()
    (bad["state_dict"]["model.a"] if where == "state_dict" else bad[where][0]["state"][0]["m"])[3] = float("nan")
    path = tmp_path / "last.ckpt"
    with pytest.raises(FloatingPointError, match="not finite"):
        SafeCheckpointIO().save_checkpoint(bad, path)
    assert not path.exists()
    torch.save(bad, path)
    with pytest.raises(DamagedCheckpoint, match="not finite"):
        load_verified(path)


def test_the_newest_that_can_be_trusted_is_used_with_a_warning(tmp_path, capsys):
    assert newest_usable(tmp_path) is None
    for step in (1, 2, 3):
        SafeCheckpointIO().save_checkpoint(state(step), step_file(tmp_path, step))
    give_name(step_file(tmp_path, 3), tmp_path / "last.ckpt")
    assert newest_usable(tmp_path) == step_file(tmp_path, 3)
    assert capsys.readouterr().err == ""
    with open(step_file(tmp_path, 3), "r+b") as file:  # also seen through its other name, last.ckpt
        file.seek(2000)
        file.write(b"\xff\xfe\xfd")
    assert newest_usable(tmp_path) == step_file(tmp_path, 2)
    assert "step_00000003.ckpt is damaged" in capsys.readouterr().err


def test_when_all_are_damaged_nothing_is_guessed(tmp_path):
    step_file(tmp_path, 1).write_bytes(b"nonsense")
    (tmp_path / "last.ckpt").write_bytes(b"nonsense too")
    with pytest.raises(UserError, match="No checkpoint"):
        newest_usable(tmp_path)


@pytest.mark.parametrize("room", [0, 700, 5000, 8000])
def test_a_disk_that_fills_up_while_torch_writes_is_named_and_nothing_is_left(tmp_path, monkeypatch, room):
    """torch's own writer would tell of a wrong position in its file."""

    class Small(io.FileIO):
        def write(self, content):
            if self.tell() + len(content) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda p, mode="r", *a, **o: (Small if mode == "wb" else real)(p, mode, *a, **o)
    )
    with pytest.raises(UserError, match=r"disk is full.*step_1\.ckpt.*are needed"):
        SafeCheckpointIO().save_checkpoint(state(), tmp_path / "step_1.ckpt")
    assert list(tmp_path.iterdir()) == []
