"""When a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """`last.ckpt`: every so many steps, and when training ends or is stopped by a signal."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(
            dirpath=folder,
            filename="last",
            every_n_train_steps=every,
            save_top_k=1,
            enable_version_counter=False,
        )
        self.path = folder / "last.ckpt"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._last_global_step_saved != trainer.global_step:
            trainer.save_checkpoint(self.path)
