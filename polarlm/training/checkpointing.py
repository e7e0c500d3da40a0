"""Decides when a checkpoint is written and which checkpoints are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from polarlm.runs.checkpoints import BEST, LAST, give_name, remove_old, step_file
from polarlm.training.recorder import Recorder


class Checkpointing(Checkpoint):
    """A checkpoint every so many steps, at every best validation loss, and when training ends or is stopped.

    Not Lightning's ModelCheckpoint, which saves a step before its validation (issue #14431) and deletes the old `last`
    before the new one is whole. One of those, added by configs/callbacks, works beside it.

    The last `keep` stay, and the best. The recorder's files are on disk before the checkpoint is: no row is lost before
    the checkpoint that follows it. Training goes on while a checkpoint is written, read back and verified: it is called
    the last (and the best) only after that. A problem ends the run at a later step; older checkpoints stay.
    """

    def __init__(self, recorder: Recorder, folder: Path, *, every: int, keep: int) -> None:
        self.recorder, self.folder, self.every, self.keep = recorder, folder, every, keep
        self.from_start = False  # also before the first step, for those who may have to go back there
        self.discard = False  # the state of this moment must not be kept
        self.saved_step: int | None = None
        self.pending: tuple[Path, bool] | None = None  # written in the background: its path, whether it is the best
        self.best: float | None = None

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether this step's state will be saved regardless of its validation loss."""
        return trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps

    def forget(self) -> None:
        """Do not keep the state of this moment."""
        self.discard = True

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.saved_step = trainer.global_step or None
        best, here = self.folder / BEST, step_file(self.folder, trainer.global_step)
        if self.best is not None and trainer.is_global_zero and here.exists() and not best.exists():
            give_name(here, best)  # the first one that was saved, killed before it got its name
        if self.from_start and trainer.global_step == 0:
            self.save(trainer)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self.pending is not None and self._written(trainer):
            self.settle(trainer)
        last = self.recorder.last
        validated = last.get("val/loss") if last.get("step") == trainer.global_step else None
        # The number of the last step is of the whole split, earlier ones may be of a part: they are not compared.
        better = validated is not None and (self.best is None or validated < self.best)
        if better and trainer.global_step < trainer.max_steps:
            self.best = validated
        if self.due(trainer) or better:
            self.save(trainer, best=better)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.saved_step != trainer.global_step and not self.discard:
            self.save(trainer)
        self.settle(trainer)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if not writes_shards(trainer):  # FSDP's processes can no longer be sure to meet
            with contextlib.suppress(Exception):  # what went wrong first is what counts
                self.settle(trainer)

    def save(self, trainer: pl.Trainer, best: bool = False) -> None:
        """Begin to write this step's checkpoint.

        Whoever goes on does so from the last: what belongs to a step has to be done before its checkpoint is that.
        """
        self.settle(trainer)
        if trainer.is_global_zero:
            self.recorder.flush()
        path = step_file(self.folder, trainer.global_step)
        trainer.save_checkpoint(path)
        self.pending = path, best
        self.saved_step = trainer.global_step

    def _written(self, trainer: pl.Trainer) -> bool:
        """Whether nobody would wait; FSDP's processes ask each other, so they do it at the same steps."""
        strategy: Any = trainer.strategy
        if writes_shards(trainer):
            return self.recorder.is_log_step(trainer, trainer.global_step) and strategy.all_wrote()
        return strategy.checkpoint_io.done

    def settle(self, trainer: pl.Trainer) -> None:
        """Wait for a checkpoint that is being written; name it the last (before that the best), let the oldest go."""
        if self.pending is None:
            return
        (path, best), self.pending = self.pending, None
        strategy: Any = trainer.strategy
        strategy.finish_saving() if writes_shards(trainer) else strategy.checkpoint_io.wait()
        if trainer.is_global_zero:
            if best:
                give_name(path, self.folder / BEST)
            give_name(path, self.folder / LAST)
            remove_old(self.folder, path, self.keep)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict.get("best")


def writes_shards(trainer: pl.Trainer) -> bool:
    """Whether every process writes its own rows (training/sharding.py, which is slow to import)."""
    return hasattr(trainer.strategy, "finish_saving")
