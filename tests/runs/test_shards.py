"""Sharded checkpoints: one process reads what several wrote, and trusts no file of it more than a whole one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polarlm.errors import UserError
from polarlm.runs.checkpoints import (
    SafeCheckpointIO,
    give_name,
    load_head,
    load_verified,
    newest_usable,
    remove_unused_shards,
    step_file,
)
from polarlm.runs.restore import load_weights
from polarlm.runs.shards import PARTS, Shards, file_name, new_folder, take_apart, write_rows
from polarlm.runs.tensor_files import DamagedCheckpoint, tensors_of


def state(step: int = 1) -> dict:
    embedding = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    weights = {"model.embedding.weight": embedding, "model.head.weight": embedding, "model.gain": torch.ones(1)}
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((5, 4), 0.5)}, 1: {"exp_avg": torch.ones(1)}}
    groups = [{"lr": 0.1, "params": [0, 1]}]
    optimiser = {"state": moments, "param_groups": groups}
    return {"global_step": step, "state_dict": weights, "optimizer_states": [optimiser]}


def save(path: Path, checkpoint: dict, processes: int = 3) -> Path:
    """What so many processes would write, one after the other; 5 rows and 1 row among 3, so some have none."""
    folder, sums = new_folder(path.parent, path.stem), []
    for process in range(processes):

        def local(tensor: torch.Tensor, process: int = process) -> torch.Tensor | None:
            if tensor.ndim == 0:
                return None
            piece = -(-len(tensor) // processes)
            return tensor[piece * process : piece * (process + 1)]

        head, rows = take_apart(checkpoint, local)
        sums.append(write_rows(folder, process, rows))
    described = {part: [own[part] for own in sums] for part in PARTS.values()}
    SafeCheckpointIO().save_checkpoint({**head, "shards": {"folder": folder.name, **described}}, path)
    return folder


def test_one_process_reads_what_several_wrote(tmp_path):
    path = step_file(tmp_path, 1)
    save(path, state())
    loaded, expected = load_verified(path), state()
    assert loaded.keys() == expected.keys()
    assert loaded["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    whole = dict(tensors_of(loaded))
    assert whole.keys() == dict(tensors_of(expected)).keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in tensors_of(expected))
    assert whole["state_dict.model.head.weight"] is whole["state_dict.model.embedding.weight"]  # tied: stored once


def test_any_rows_can_be_read_however_they_were_cut(tmp_path):
    path = step_file(tmp_path, 1)
    save(path, state())
    shards = Shards(path, load_head(path))
    whole = state()["state_dict"]["model.embedding.weight"]
    for begin in range(6):
        for end in range(begin, 6):
            assert torch.equal(shards.rows("weights", "model.embedding.weight", begin, end), whole[begin:end])
    with pytest.raises(DamagedCheckpoint, match="has 5 rows"):
        shards.rows("weights", "model.embedding.weight", 3, 6)


def test_a_model_is_read_without_its_optimiser(tmp_path):
    path = step_file(tmp_path, 1)
    folder = save(path, state())
    for process in range(3):
        (folder / file_name("optimiser", process)).unlink()
    assert torch.equal(load_weights(path)["embedding.weight"], state()["state_dict"]["model.embedding.weight"])
    with pytest.raises(DamagedCheckpoint, match=r"optimiser_00000\.safetensors is missing"):
        load_verified(path)


@pytest.mark.parametrize("part", PARTS.values())
@pytest.mark.parametrize("fault", ["bit", "missing", "torn", "other step", "not finite"])
def test_a_shard_that_is_wrong_is_noticed_and_the_newest_good_one_used(tmp_path, capsys, part, fault):
    for step in (1, 2):
        save(step_file(tmp_path, step), state(step))
    give_name(step_file(tmp_path, 2), tmp_path / "last.ckpt")
    assert newest_usable(tmp_path) == step_file(tmp_path, 2) and capsys.readouterr().err == ""
    file = tmp_path / "shards" / "step_00000002" / file_name(part, 1)
    content = bytearray(file.read_bytes())
    if fault == "bit":
        content[-2] ^= 4
        file.write_bytes(content)
    elif fault == "missing":
        file.unlink()
    elif fault == "torn":
        file.write_bytes(content[:-3])
    elif fault == "other step":
        other = state(7)
        other["optimizer_states"][0]["state"][0]["exp_avg"] *= 2
        file.write_bytes((save(step_file(tmp_path / "other", 2), other) / file.name).read_bytes())
    else:
        save_file({"x": torch.tensor([float("nan")])}, file)
    with pytest.raises(DamagedCheckpoint, match=file.name):
        load_verified(step_file(tmp_path, 2))
    assert newest_usable(tmp_path) == step_file(tmp_path, 1)
    assert file.name in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_not_saved(tmp_path):
    bad = state()
    bad["optimizer_states"][0]["state"][0]["exp_avg"][4, 1] = float("inf")
    with pytest.raises(FloatingPointError, match="exp_avg is not finite"):
        save(step_file(tmp_path, 1), bad)
    assert not step_file(tmp_path, 1).exists()


def test_shards_go_with_the_last_checkpoint_that_names_them(tmp_path):
    for step in (1, 2):
        save(step_file(tmp_path, step), state(step))
    give_name(step_file(tmp_path, 1), tmp_path / "best.ckpt")
    left_over = new_folder(tmp_path, "step_00000003")  # of a process that was killed
    (left_over / ".weights_00000.safetensors.tmp").write_bytes(b"half")
    again = save(step_file(tmp_path, 2), state(2))  # the same step once more, while the old file still has its name
    assert again.name == "step_00000002.1"
    step_file(tmp_path, 1).unlink()
    remove_unused_shards(tmp_path)
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == ["step_00000001", "step_00000002.1"]
    assert load_verified(tmp_path / "best.ckpt")["global_step"] == 1
    (tmp_path / "best.ckpt").write_bytes(b"nonsense")  # nobody knows what it named: nothing is deleted
    step_file(tmp_path, 2).unlink()
    remove_unused_shards(tmp_path)
    assert len(list((tmp_path / "shards").iterdir())) == 2
    (tmp_path / "best.ckpt").unlink()
    remove_unused_shards(tmp_path)
    assert not (tmp_path / "shards").exists()


# -- from a stranger ---------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


HOSTILE = {
    "another folder": {"folder": "../../secret"},
    "an absolute folder": {"folder": "/secret"},
    "a number": {"folder": 7},
    "no checksums": {"weights": []},
    "checksums that are none": {"weights": 3},
    "fewer files": {"weights": ["0"]},
    "nothing": None,
    "text": "step_00000001",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_stranger_writes_about_shards_is_refused(tmp_path, what):
    path = step_file(tmp_path, 1)
    save(path, state())
    head = torch.load(path, weights_only=True)
    shards = HOSTILE[what]
    torch.save({**head, "shards": {**head["shards"], **shards} if isinstance(shards, dict) else shards}, path)
    with pytest.raises(DamagedCheckpoint, match="does not say which shards"):
        load_verified(path)
    with pytest.raises(UserError, match="No checkpoint"):
        newest_usable(tmp_path)


@pytest.mark.parametrize("mark", [{"sharded": "no/such"}, {"sharded": ["x"]}, {"sharded": None}])
def test_marks_without_a_tensor_are_refused(tmp_path, mark):
    path = step_file(tmp_path, 1)
    save(path, state())
    torch.save({**torch.load(path, weights_only=True), "state_dict": {"model.embedding.weight": mark}}, path)
    with pytest.raises(DamagedCheckpoint, match="does not fit its shards"):
        load_weights(path)


def test_shards_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = step_file(tmp_path, 1)
    folder = save(path, state())
    torch.save({"embedding.weight": Evil()}, folder / file_name("weights", 0))  # a pickle under a shard's name
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        load_verified(path)
    torch.save({**state(), "shards": Evil()}, path)
    with pytest.raises(DamagedCheckpoint, match="more than tensors"):
        load_verified(path)
    assert not (tmp_path / "executed").exists()
