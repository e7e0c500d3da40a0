"""What happens after an optimiser step, in this order: validation, the probe, the one metrics row, the checkpoint.

Lightning runs validation after on_train_batch_end, where ModelCheckpoint has already saved the step (issue #14431): a
kill in between would lose that validation for ever. Here Lightning's own validation loop is started by a callback, so
that the row with its numbers is on disk before the checkpoint is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from polarlm.diagnostics import eval_mode, run_probe
from polarlm.errors import UserError
from polarlm.fast.backends import choices, forget_choices
from polarlm.runs.files import read_json, write_json
from polarlm.runs.lock import RunLock
from polarlm.training.recorder import Recorder


class StepPart(Protocol):
    """An action after every optimiser step."""

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


class Validation(pl.Callback):
    """Every `every` steps on part of the validation split; at the last step on every evaluation split, whole.

    Which text is read is LMDataModule.val_dataloader's to say, what is counted LanguageModel.validation_step's.
    """

    def __init__(self, recorder: Recorder, *, every: int) -> None:
        self.recorder, self.every = recorder, every

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether this step is validated."""
        return trainer.global_step == trainer.max_steps or bool(self.every and trainer.global_step % self.every == 0)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.should_stop:  # a callback ended training: this is the last step
            end_here(trainer)
        if self.due(trainer):
            with self.recorder.pause():
                run_validation(trainer)
                if trainer.should_stop and trainer.global_step < trainer.max_steps:
                    end_here(trainer)
                    run_validation(trainer)  # whole splits
            self.recorder.row |= module.evaluated


def end_here(trainer: pl.Trainer) -> None:
    """Make this step the last one of the run."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def run_validation(trainer: pl.Trainer) -> None:
    """Lightning's validation loop, now; the Trainer's own schedule for it is switched off (limit_val_batches=0)."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first = connector._first_loop_iter  # as Lightning keeps it when it validates within an epoch
    loop._combined_loader = None  # the last step reads other text than the ones before it
    trainer.limit_val_batches, trainer.validating = 1.0, True
    try:
        loop.run()
    finally:
        trainer.limit_val_batches, trainer.training = 0, True
        connector._first_loop_iter = first


class Probing(pl.Callback):
    """Every `every` steps, before the first and after the last: look inside the model on fixed validation text.

    Rank 0 measures. Under DDP the others go on and wait for it at the next gradient exchange; under FSDP they take part
    in the forward pass, because every rank holds a piece of the weights, but record nothing.
    """

    def __init__(self, recorder: Recorder, data: Any, options: dict[str, Any]) -> None:
        self.every, self.tokens, self.length = (options[key] for key in ("every", "tokens", "length"))
        if self.every < 0 or (self.every and (self.tokens < 1 or self.length < 2)):
            raise UserError(
                f"diagnostics.every={self.every}, tokens={self.tokens}, length={self.length}: every must be 0 (off) or "
                "a number of steps, tokens at least 1 and length at least 2"
            )
        self.recorder, self.data = recorder, data
        self.batch: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
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
                self.recorder.probes.append(row := result.row(step, tokens))
                for logger in trainer.loggers:
                    if hasattr(logger, "log_probe"):
                        logger.log_probe(row)
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


# -- Ctrl-C, SIGTERM and SIGUSR1 stop a run between two steps, with a checkpoint from which it continues --------------


# SIGUSR1 is what SLURM's users are used to have sent before a job's time is over (sbatch --signal=USR1@120).
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class GracefulStop(pl.Callback):
    """Ends training after the running step; a second Ctrl-C ends it at once.

    With several processes the signal may reach only one of them, so they agree on it every `agree_every` steps.
    """

    def __init__(self, agree_every: int) -> None:
        self.agree_every = agree_every
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for number in SIGNALS:  # after Lightning has installed its own handler for SIGTERM, which stops in mid-step
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGINT:  # written without print, which must not be called while it is running
            os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C again: at once) ...\n")

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        stop = self.received is not None
        if trainer.world_size > 1:
            if trainer.global_step % self.agree_every:
                return
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        if stop and trainer.global_step < trainer.max_steps:
            self.received = self.received or signal.SIGTERM
            trainer.should_stop = True

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def exit_code(self) -> int | None:
        """128 + signal number when a signal ended the run early, as shells and schedulers expect."""
        return None if self.received is None else 128 + self.received


class SignOfLife(pl.Callback):
    """Keeps the run folder's lock young, for machines that see the file but not the lock."""

    def __init__(self, lock: RunLock) -> None:
        self.lock, self._at = lock, time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        if time.monotonic() - self._at > 30:
            self._at = time.monotonic()
            self.lock.touch()


# -- which attention backend a run really uses: in its folder, its loggers and, on a GPU, said aloud ------------------


class RecordBackend(pl.Callback):
    """After the first step: what `block.backend=auto` stood for, and why the faster backends were not taken."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._done = folder, False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        forget_choices()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        if self._done:
            return
        self._done = True
        made = [str(choice) for choice in choices()]
        known = read_json(self.folder / "environment.json") or {}
        chosen = {**known.get("chosen", {}), "attention": made}
        write_json(self.folder / "environment.json", {**known, "chosen": chosen})
        if any(choice.device == "cuda" for choice in choices()):
            print(f"  attention: {', '.join(made)}", file=sys.stderr, flush=True)
        for logger in trainer.loggers:
            config: Any = getattr(getattr(logger, "experiment", None), "config", None)
            if hasattr(config, "update"):
                config.update({"attention": made}, allow_val_change=True)
