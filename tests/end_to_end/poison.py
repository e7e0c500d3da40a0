"""A callback that makes a run fail in the middle, as a broken kernel or faulty memory would."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class PoisonWeights(pl.Callback):
    """Sets one weight to NaN after `after_step` steps, so that the gradients of the next step are not finite."""

    def __init__(self, after_step: int) -> None:
        self.after_step = after_step

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.after_step:
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] = torch.nan
