import os
import pickle

import pytest
import torch

from polarlm.errors import UserError
from polarlm.runs.checkpoints import SafeCheckpointIO, load_checkpoint


def test_a_checkpoint_that_carries_code_is_refused_and_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(UserError, match="more than tensors"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError):
        load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_saving_replaces_in_one_step_and_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    io = SafeCheckpointIO()
    io.save_checkpoint({"x": torch.ones(3)}, path)
    with pytest.raises(UserError):  # what can't be read back safely never becomes the checkpoint
        io.save_checkpoint({"x": object}, path)
    assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))


def test_damaged_and_missing_files_give_one_sentence(tmp_path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(UserError, match="no checkpoint"):
        load_checkpoint(path)
    SafeCheckpointIO().save_checkpoint({"x": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="can't be loaded"):
        load_checkpoint(path)
