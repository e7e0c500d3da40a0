"""The probe around training: diagnostics/probe.jsonl, and the same numbers in the metrics row and the loggers.

    probing = Probing(recorder, datamodule, config["diagnostics"], run_folder)
    Trainer(callbacks=[seed, validation, probing, recorder, checkpoint])     # between Validation and Recorder

Processes: rank 0 measures. Under DDP the others go on and wait for it at the next gradient exchange; under FSDP they
take part in the forward pass, because every rank holds a piece of the weights, but record nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from polarlm.diagnostics import eval_mode, run_probe
from polarlm.errors import UserError
from polarlm.training.callbacks import Recorder
from polarlm.training.loggers.json_lines import JsonLines


class Probing(pl.Callback):
    """Every `every` steps, before the first and after the last: look inside the model on fixed validation text."""

    def __init__(self, recorder: Recorder, data: Any, options: dict[str, Any], folder: Path) -> None:
        self.every, self.tokens, self.length = (options[key] for key in ("every", "tokens", "length"))
        if self.every < 0 or (self.every and (self.tokens < 1 or self.length < 2)):
            raise UserError(
                f"diagnostics.every={self.every}, tokens={self.tokens}, length={self.length}: every must be 0 (off) or "
                "a number of steps, tokens at least 1 and length at least 2"
            )
        self.recorder, self.data = recorder, data
        self.file = JsonLines(folder / "diagnostics" / "probe.jsonl")
        self.batch: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.file.rewind(trainer.global_step or -1)  # a run that begins again probes its step 0 again
        if self.every:
            self.batch = probe_batch(self.data, tokens=self.tokens, length=self.length)
            if trainer.global_step == 0:
                self.probe(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        step = trainer.global_step
        if self.every and (step % self.every == 0 or step == trainer.max_steps):
            self.recorder.row |= self.probe(trainer, module)

    def probe(self, trainer: Any, module: Any) -> dict[str, float | None]:
        """Probe now and write it; returns its flat scalars and what it cost."""
        assert self.batch is not None
        began = time.perf_counter()
        scalars: dict[str, float | None] = {}
        batch = {name: tensor.to(module.device) for name, tensor in self.batch.items()}
        with self.recorder.pause(), trainer.strategy.precision_plugin.forward_context():
            if trainer.is_global_zero:
                result = run_probe(module.model, batch["tokens"], batch.get("documents"))
                step, tokens = trainer.global_step, trainer.global_step * self.recorder.batch_tokens
                self.file.path.parent.mkdir(parents=True, exist_ok=True)
                self.file.log_metrics(result.row(step, tokens))
                for logger in trainer.loggers:
                    if hasattr(logger, "log_probe"):
                        logger.log_probe(result, step=step, tokens=tokens)
                scalars = result.scalars()
            elif is_sharded(module.model):
                with torch.no_grad(), eval_mode(module.model):
                    module.model(batch["tokens"], documents=batch.get("documents"))
        return scalars | {"time/probe": round(time.perf_counter() - began, 4)}


def probe_batch(data: Any, *, tokens: int, length: int) -> dict[str, Tensor]:
    """Windows spread evenly over the validation split, the same for every block, seed and process count."""
    store = data.corpus.store("val")
    length = min(length, data.context, len(store))
    count = max(1, tokens // length)
    begins = np.unique(np.linspace(0, len(store) - length, count).astype(np.int64))
    batch = {"tokens": torch.from_numpy(store.windows(begins, length))}
    if data.mask_documents:
        batch["documents"] = torch.from_numpy(np.stack([store.document_ids(int(b), length) for b in begins]))
    return batch


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a forward pass needs the other processes (FSDP2)."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)
