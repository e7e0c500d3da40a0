"""The Lightning module: a GPT, its loss, its optimiser and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from polarlm.model import GPT
from polarlm.model.loss import IGNORED
from polarlm.training.gradients import clip, gradients_of, scale, total_norm
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
        weigh: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim, self.schedule = optim, schedule
        self.batch_tokens, self.max_steps = batch_tokens, max_steps
        self.compiled = compiled
        self._loss: Callable[..., Tensor] = model.loss
        # Micro-batches may count different numbers of targets (padding, masked borders): weigh them by what they count.
        self.weigh = weigh
        # Of the running step, kept on the device: losses summed over its micro-batches, and the targets they count.
        self.step_loss: Tensor | None = None
        self.step_counted: Tensor | None = None
        # Of the step that is being taken: the gradients' norm before clipping, and the learning rate.
        self.grad_norm: Tensor | None = None
        self.step_lr = 0.0

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
        self._loss = torch.compile(self.model.loss) if self.compiled else self.model.loss

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Mean loss of one micro-batch; weighed, its share of counted targets times it (exactly 1 when all count)."""
        loss = self._loss(batch["tokens"], batch["targets"], documents=batch.get("documents"))
        if self.weigh:
            counted = (batch["targets"] != IGNORED).sum()
            loss = loss * (counted / batch["targets"].numel())
            self.step_counted = counted if self.step_counted is None else self.step_counted + counted
        detached = loss.detach()
        self.step_loss = detached if self.step_loss is None else self.step_loss + detached
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Between the last backward pass of a step and the step: weigh and clip (Lightning's own clipping is off)."""
        gradients = gradients_of(p for group in optimizer.param_groups for p in group["params"])
        if self.weigh:
            # So far the sum of nats is divided by all targets of the step; now by those that count, on every process.
            counted = self.trainer.strategy.reduce(self.step_counted, reduce_op="sum")
            factor = self.batch_tokens / counted.clamp_min(1)
            scale(gradients, factor)
            self.step_loss, self.step_counted = self.step_loss * factor, None  # type: ignore[operator]
        self.grad_norm = total_norm(gradients)
        self.step_lr = optimizer.param_groups[0]["lr"]
        if self.optim["grad_clip"]:
            clip(gradients, self.grad_norm, float(self.optim["grad_clip"]))

    def configure_optimizers(self) -> Any:
        """AdamW and a per-step schedule counted in tokens."""
        options = {key: value for key, value in self.optim.items() if key != "grad_clip"}
        # A fused optimiser unscales 16-bit gradients inside its step, too late for clipping.
        optimiser = build_adamw(self.model, **options, fused=self.trainer.precision != "16-mixed")
        options = {key: value for key, value in self.schedule.items() if key != "kind"}
        factor = learning_rate_factor(self.schedule["kind"], self.batch_tokens * self.max_steps, **options)
        # Step s (from 0) is taken with the factor at its end, so that the first step of a warm-up is not wasted.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: factor((step + 1) * self.batch_tokens))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
