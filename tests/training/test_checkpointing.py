"""Training goes on while a checkpoint is verified, which is called the last only after that."""

import threading

import lightning.pytorch as pl
import pytest

from polarlm.runs import checkpoints
from polarlm.runs.tensor_files import DamagedCheckpoint
from tests.training.tiny_jobs import fitted

OPTIONS = ("trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.micro_batch_tokens=128")


@pytest.fixture(autouse=True)
def _no_peak(monkeypatch):
    monkeypatch.setattr("polarlm.training.hardware.measured_peak", lambda **_: 1e9)


class Watch(pl.Callback):
    """After every step: what exists. After step 3, lets the verification of step 2 go on."""

    def __init__(self, folder, go_on: threading.Event) -> None:
        self.folder, self.go_on, self.seen = folder / "checkpoints", go_on, {}

    def on_train_batch_end(self, trainer, *_) -> None:
        names = ("step_00000002.ckpt", "last.ckpt")
        self.seen[trainer.global_step] = [name for name in names if (self.folder / name).exists()]
        if trainer.global_step == 3:
            self.go_on.set()


def test_a_checkpoint_is_verified_while_training_goes_on_and_is_the_last_only_then(tmp_path, monkeypatch):
    go_on, real = threading.Event(), checkpoints.verify_checksums

    def slow(path):
        assert go_on.wait(60), "training waits for the verification"
        real(path)

    monkeypatch.setattr(checkpoints, "verify_checksums", slow)
    watch = Watch(tmp_path / "run", go_on)
    fitted(tmp_path, tmp_path / "run", *OPTIONS, extra=(watch,))
    assert watch.seen[2] == watch.seen[3] == []  # neither the step's file nor the name before they are verified
    assert watch.seen[6] == ["step_00000002.ckpt", "last.ckpt"]
    assert checkpoints.load_verified(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_what_is_written_is_the_state_of_its_step_and_not_of_a_later_one(tmp_path, monkeypatch):
    go_on, real = threading.Event(), checkpoints.write_checkpoint

    def late(checkpoint, target):
        assert go_on.wait(60)
        real(checkpoint, target)

    fitted(tmp_path, tmp_path / "plain", *OPTIONS, "trainer.keep_checkpoints=9")
    monkeypatch.setattr(checkpoints, "write_checkpoint", late)
    fitted(tmp_path, tmp_path / "late", *OPTIONS, "trainer.keep_checkpoints=9", extra=(Watch(tmp_path, go_on),))
    one, two = (
        checkpoints.load_verified(tmp_path / name / "checkpoints" / "step_00000002.ckpt") for name in ("plain", "late")
    )
    for part in ("state_dict", "optimizer_states"):
        tensors = [dict(checkpoints.tensors_of(state[part])) for state in (one, two)]
        assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])


def test_a_checkpoint_that_does_not_verify_ends_the_run_and_is_never_the_last(tmp_path, monkeypatch):
    real = checkpoints.verify_checksums

    def broken(path):
        if "00000004" in path.name:
            raise DamagedCheckpoint(f"{path} is damaged")
        real(path)

    monkeypatch.setattr(checkpoints, "verify_checksums", broken)
    with pytest.raises(DamagedCheckpoint, match="00000004"):
        fitted(tmp_path, tmp_path / "run", *OPTIONS)
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints.load_verified(folder / "last.ckpt")["global_step"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step_00000002.ckpt"]
