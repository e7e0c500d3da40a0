"""One notion of "a step ended", and the one place that says what then happens in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import lightning.pytorch as pl


class StepPart(Protocol):
    """Something that happens after every optimiser step."""

    def on_step_end(self, trainer: Any, module: Any) -> bool | None:
        """Do it; True ends the handling of this step (training is about to stop, nothing of it may be kept)."""
        ...


class Steps(pl.Callback):
    """Calls its parts, in their order, once after every optimiser step (a step may be many micro-batches)."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self.parts = tuple(parts)
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        for part in self.parts:
            if part.on_step_end(trainer, module):
                return
