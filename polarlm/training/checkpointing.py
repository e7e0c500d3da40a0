"""When a checkpoint is written, and which are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from polarlm.runs.checkpoints import BEST, LAST, give_name, remove_old, step_file
from polarlm.training.callbacks import Recorder


class Checkpointing(pl.Callback):
    """A checkpoint every so many steps, at every best validation loss, and when training ends or is stopped.

    The last `keep` stay, and the best. What `flush` writes is on disk before the checkpoint is: no row is lost before
    the checkpoint that follows it.
    """

    def __init__(
        self, recorder: Recorder, folder: Path, *, every: int, keep: int, flush: Sequence[Callable[[], None]] = ()
    ) -> None:
        self.recorder, self.folder, self.every, self.keep, self.flush = recorder, folder, every, keep, flush
        self.from_start = False  # also before the first step, for those who may have to go back there
        self.discard = False  # the state of this moment must not be kept
        self.saved_step: int | None = None
        self.best: float | None = None

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether this step's state will be saved whatever its validation says."""
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

    def save(self, trainer: pl.Trainer, best: bool = False) -> None:
        """Write this step's checkpoint, name it the last (before that the best, if it is), and let the oldest go.

        Whoever goes on does so from the last: what belongs to a step has to be done before its checkpoint is that.
        """
        if trainer.is_global_zero:
            for write in self.flush:
                write()
        path = step_file(self.folder, trainer.global_step)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            if best:
                give_name(path, self.folder / BEST)
            give_name(path, self.folder / LAST)
            remove_old(self.folder, path, self.keep)
        self.saved_step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict.get("best")
