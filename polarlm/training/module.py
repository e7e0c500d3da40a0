"""The Lightning module: a GPT, its loss, its optimiser, its schedule and its metrics.

    data = LMDataModule(corpus, context=64, micro_batch=16, seed=1)
    module = LanguageModel(GPT(...), seed=1)
    trainer = Trainer(max_steps=100)                    # stock Lightning
    trainer.fit(module, data); trainer.validate(module, data); trainer.test(module, data)

The numbers are those of train.py and eval.py, and a run resumed from one of Lightning's checkpoints draws the same
batches and random numbers: both are functions of the step (Lightning itself restores neither, issue #18780).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor

from polarlm.data.module import EvalLoader
from polarlm.evaluation.metrics import Tally, TextSize, measure
from polarlm.evaluation.scores import text_size
from polarlm.ignored import IGNORED
from polarlm.locations import CONFIGS
from polarlm.model import GPT
from polarlm.training.hardware import compiled_loss
from polarlm.training.incidents import Incidents
from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm
from polarlm.training.schedules import Schedule, build_schedule

Batch = dict[str, Tensor]


class LanguageModel(pl.LightningModule):
    """Next-token training and evaluation of a GPT.

    `optim` and `schedule` are the keys of those groups; None takes the shipped adamw.yaml and cosine.yaml.
    """

    def __init__(
        self,
        model: GPT,
        *,
        optim: dict[str, Any] | None = None,
        schedule: Schedule | dict[str, Any] | None = None,
        seed: int = 1,
        compiled: bool = False,
        incidents: Incidents | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim = optim or shipped("optim", "adamw")
        self.schedule, self.seed, self.compiled, self.incidents = schedule, seed, compiled, incidents
        self.log_steps = True  # False where a Recorder writes one row per step, before its checkpoint
        self._loss: Callable[..., Tensor] = model.loss
        self.step_loss: Tensor | None = None  # sum over the micro-batches of the running step, kept on the device
        # Of the step that is being taken: the gradients' norm before clipping, and the learning rate.
        self.grad_norm: Tensor | None = None
        self.step_lr = 0.0
        self.tallies: dict[str, Tally] = {}  # of the last evaluation, by split
        self._totals: dict[int, Tensor] = {}  # of the running one, by dataloader: nats, targets, hits (float64)

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
        self._loss = compiled_loss(self.model) if self.compiled else self.model.loss

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """The model's logits."""
        return self.model(tokens, **options)

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed dropout by (seed, step, micro-batch, rank): a resumed run draws the same numbers."""
        trainer = self.trainer
        micro = batch_idx % trainer.accumulate_grad_batches
        if micro == 0:
            self.step_loss = None
        number = (((self.seed * 1_000_003 + trainer.global_step) * 1009) + trainer.global_rank) * 1009 + micro
        torch.manual_seed(number % 2**64)  # what torch can take

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """A micro-batch's part of the step's mean loss: its nats over the targets that count, however the step is cut.

        Averaged over micro-batches (accumulation) and processes, the parts are the mean over all targets that count.
        """
        nats = self._loss(batch["tokens"], batch["targets"], documents=batch.get("documents"), reduction="sum")
        loss = nats / batch["counted"]
        detached = loss.detach()
        self.step_loss = detached if self.step_loss is None else self.step_loss + detached
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the total norm at the Trainer's gradient_clip_val, else at optim.grad_clip; keep the norm.

        Lightning's own clipping refuses fused optimisers under mixed precision (issue #21435).
        """
        gradients = gradients_of(p for group in optimizer.param_groups for p in group["params"])
        self.grad_norm = total_norm(gradients)
        if self.incidents is not None:
            self.incidents.suppress(self.grad_norm, self.trainer.global_step + 1, optimizer)
        self.step_lr = optimizer.param_groups[0]["lr"]
        if limit := gradient_clip_val or self.optim["grad_clip"]:
            clip(gradients, self.grad_norm, float(limit))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the step's metrics when its last micro-batch is done."""
        accumulate = self.trainer.accumulate_grad_batches
        if self.log_steps and (batch_idx + 1) % accumulate == 0 and self.step_loss is not None:
            self.log("train/loss", self.step_loss / accumulate, prog_bar=True, sync_dist=True)
            self.log("train/lr", self.step_lr)
            self.log("train/grad_norm", self.grad_norm)  # type: ignore[arg-type]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count losses and hits of a batch; sums over batches are taken in float64."""
        targets = batch["targets"]
        nats, hits = self.model.tally(batch["tokens"], targets, documents=batch.get("documents"))
        counts = torch.stack([nats.double(), (targets != IGNORED).sum().double(), hits.double()])
        self._totals[dataloader_idx] = (
            self._totals[dataloader_idx] + counts if dataloader_idx in self._totals else counts
        )

    def on_validation_epoch_start(self) -> None:
        self._totals = {}

    def on_validation_epoch_end(self) -> None:
        """Log every metric of every split that was read (polarlm/evaluation/metrics.py), summed over the processes."""
        # trainer.val_dataloaders would be those of an earlier fit.
        loaders = self.trainer._evaluation_loop._combined_loader.flattened  # type: ignore[union-attr]
        self.tallies = {}
        for index, totals in self._totals.items():
            loader = loaders[index]
            nats, counted, hits = self.trainer.strategy.reduce(totals, reduce_op="sum").tolist()
            split, text = "test" if self.trainer.testing else "val", TextSize(int(counted), 0, 0, 0)
            if isinstance(loader, EvalLoader):  # of other loaders the text's bytes and words are unknown
                split, text = loader.split, text_size(loader.store, loader.tokenizer, loader.tokens)
            self.tallies[split] = Tally(nats=nats, targets=int(counted), correct=int(hits), text=text)
        for name, value in self.evaluated.items():
            if value is not None and math.isfinite(value):
                self.log(name, value, logger=self.log_steps, rank_zero_only=True, add_dataloader_idx=False)

    test_step, on_test_epoch_start, on_test_epoch_end = (
        validation_step, on_validation_epoch_start, on_validation_epoch_end,
    )  # fmt: skip

    @property
    def evaluated(self) -> dict[str, float | None]:
        """{split/metric: value} of the last evaluation, in full precision (Lightning logs float32)."""
        return {
            f"{split}/{name}": value for split, tally in self.tallies.items() for name, value in measure(tally).items()
        }

    # -- optimiser and checkpoints -------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Number the optimiser's parameters as the model lists them, not as its groups do."""
        for optimiser, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            renumber(state, optimiser, self)

    def configure_optimizers(self) -> Any:
        """The chosen optimiser and a per-step schedule counted in tokens."""
        steps = self.trainer.max_steps
        if steps < 1:
            raise ValueError("Trainer(max_steps=…) must be given: the training batches of LMDataModule never end")
        # A fused optimiser unscales 16-bit gradients inside its step, too late for clipping.
        optimiser = build_optimiser(self.optim, self.model, fused=self.trainer.precision != "16-mixed")
        tokens = getattr(self.trainer.datamodule, "tokens_per_step", 1)  # type: ignore[attr-defined]
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = build_schedule(schedule or shipped("schedule", "cosine"), steps * tokens)

        def factor(step: int) -> float:
            # Step s (from 0) is taken with the factor at its end, so that the first step of a warm-up is not wasted.
            return schedule.factor((step + 1) * tokens, steps * tokens)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, factor)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def evaluate_split(model: GPT, loader: EvalLoader) -> Tally:
    """Count a split with Lightning's validation loop and `validation_step`, in fp32 on the model's device."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    device = model.embedding.weight.device
    module = LanguageModel(model)
    module.log_steps = False
    trainer = pl.Trainer(
        accelerator={"cuda": "gpu"}.get(device.type, device.type),
        devices=[device.index or 0] if device.type == "cuda" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # one process, also inside a SLURM job of many
    )
    trainer.validate(module, loader, verbose=False)
    model.to(device)  # Lightning leaves it on the CPU
    return module.tallies[loader.split]


def shipped(group: str, choice: str) -> dict[str, Any]:
    """The settings of a shipped choice."""
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{choice}.yaml"))  # type: ignore[return-value]


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
