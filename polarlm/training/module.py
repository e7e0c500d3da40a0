"""The Lightning module: a GPT, its loss, its optimiser and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from polarlm.model import GPT
from polarlm.training.gradients import clip, gradients_of, total_norm
from polarlm.training.incidents import Incidents
from polarlm.training.optimisers import build_optimiser
from polarlm.training.schedules.warmup import Schedule

Batch = dict[str, Tensor]


class LanguageModel(pl.LightningModule):
    """Next-token training of a GPT; everything it needs beyond the model is plain numbers."""

    def __init__(
        self,
        model: GPT,
        *,
        optim: dict[str, Any],
        schedule: Schedule,
        batch_tokens: int,
        max_steps: int,
        compiled: bool,
        incidents: Incidents | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim, self.schedule = optim, schedule
        self.batch_tokens, self.max_steps = batch_tokens, max_steps
        self.compiled = compiled
        self.incidents = incidents
        self._loss: Callable[..., Tensor] = model.loss
        self.step_loss: Tensor | None = None  # sum over the micro-batches of the running step, kept on the device
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
        """A micro-batch's part of the step's mean loss: its nats over the targets that count, however the step is cut.

        Averaged over micro-batches (accumulation) and processes, the parts are the mean over all targets that count.
        """
        nats = self._loss(batch["tokens"], batch["targets"], documents=batch.get("documents"), reduction="sum")
        loss = nats / batch["counted"]
        detached = loss.detach()
        self.step_loss = detached if self.step_loss is None else self.step_loss + detached
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Between the last backward pass of a step and the step (Lightning's own clipping is off)."""
        gradients = gradients_of(p for group in optimizer.param_groups for p in group["params"])
        self.grad_norm = total_norm(gradients)
        if self.incidents is not None:
            self.incidents.suppress(self.grad_norm, self.trainer.global_step + 1, optimizer)
        self.step_lr = optimizer.param_groups[0]["lr"]
        if self.optim["grad_clip"]:
            clip(gradients, self.grad_norm, float(self.optim["grad_clip"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Number the optimiser's parameters as the model lists them, not as its groups do."""
        for optimiser, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            renumber(state, optimiser, self)

    def configure_optimizers(self) -> Any:
        """The chosen optimiser and a per-step schedule counted in tokens."""
        # A fused optimiser unscales 16-bit gradients inside its step, too late for clipping.
        optimiser = build_optimiser(self.optim, self.model, fused=self.trainer.precision != "16-mixed")
        total = self.batch_tokens * self.max_steps

        def factor(step: int) -> float:
            # Step s (from 0) is taken with the factor at its end, so that the first step of a warm-up is not wasted.
            return self.schedule.factor((step + 1) * self.batch_tokens, total)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def renumber(state: dict[str, Any], optimiser: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Change the numbers in an optimiser's state dict from its own order to that of the model's parameters, in place.

    torch reads any numbering: it goes by the order inside the groups, which stays.
    """
    in_model = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    numbers = {index: in_model[id(parameter)] for index, parameter in enumerate(parameters)}
    state["state"] = {numbers[index]: values for index, values in state["state"].items()}
    state["param_groups"] = [
        {**group, "params": [numbers[index] for index in group["params"]]} for group in state["param_groups"]
    ]
