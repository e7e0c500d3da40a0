"""The Lightning module: a GPT, its loss, its optimiser and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from polarlm.attention.kernels.fusion import fuse_everything
from polarlm.model import GPT
from polarlm.training.optimiser import build_adamw
from polarlm.training.schedule import learning_rate_factor

Batch = dict[str, Tensor]


class LanguageModel(pl.LightningModule):
    """Next-token training of a GPT; everything it needs beyond the model is plain numbers."""

    def __init__(
        self,
        model: GPT,
        *,
        optim: dict[str, Any],
        schedule: dict[str, Any],
        batch_tokens: int,
        max_steps: int,
        compiled: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim, self.schedule = optim, schedule
        self.batch_tokens, self.max_steps = batch_tokens, max_steps
        self.compiled = compiled
        self._loss: Callable[..., Tensor] = model.loss
        self.step_loss: Tensor | None = None  # sum over the micro-batches of the running step, kept on the device

    def configure_model(self) -> None:
        """Shard block by block (FSDP2) when the strategy asks for it; compile the loss in place."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not hasattr(self.model, "_fsdp_sharded"):
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for block in self.model.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.model, mesh=mesh["data_parallel"])
            for entrance in ("loss", "tally"):  # training and validation do not enter through `forward`
                register_fsdp_forward_method(self.model, entrance)
            self.model._fsdp_sharded = True  # type: ignore[assignment]
        fuse_everything(self.compiled)  # attention's own loops are opaque to the compiler of the model
        self._loss = torch.compile(self.model.loss) if self.compiled else self.model.loss

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Mean loss of one micro-batch."""
        loss = self._loss(batch["tokens"], batch["targets"], documents=batch.get("documents"))
        detached = loss.detach()
        self.step_loss = detached if self.step_loss is None else self.step_loss + detached
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW and a per-step schedule counted in tokens."""
        optimiser = build_adamw(self.model, **{key: value for key, value in self.optim.items() if key != "grad_clip"})
        options = {key: value for key, value in self.schedule.items() if key != "kind"}
        factor = learning_rate_factor(self.schedule["kind"], self.batch_tokens * self.max_steps, **options)
        # Step s (from 0) is taken with the factor at its end, so that the first step of a warm-up is not wasted.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: factor((step + 1) * self.batch_tokens))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
