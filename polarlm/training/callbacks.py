"""What happens after an optimiser step, in this order: validation, the probe, the one metrics row, the checkpoint.

Lightning runs validation after on_train_batch_end, where ModelCheckpoint has already saved the step (issue #14431): a
kill in between would lose that validation for ever. Here Lightning's own validation loop is started by a callback, so
that the row with its numbers is on disk before the checkpoint is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from polarlm.diagnostics import eval_mode, run_probe
from polarlm.errors import UserError
from polarlm.training.loggers.build import numbers_of, replay
from polarlm.training.loggers.json_lines import RECORDS, JsonLines, RowLogger
from polarlm.training.loggers.throughput import HardwarePeak, compile_seconds


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


class Recorder(pl.Callback):
    """Collects what the other callbacks found at a step and writes it as one row to every logger.

    Speed is that of the steady state: without validation, diagnostics and compilation, and without the first step of a
    process, which warms up. So the row of that step has no speed.
    """

    def __init__(
        self, folder: Path, *, batch_tokens: int, flops_per_token: int, log_every: int, peak: HardwarePeak | None = None
    ) -> None:
        self.folder = folder
        self.metrics, self.probes, self.samples = self.files = [JsonLines(folder / name) for name in RECORDS]
        self.logger = RowLogger()  # what other callbacks log joins the row; one of the Trainer's loggers
        self.batch_tokens, self.flops_per_token, self.log_every = batch_tokens, flops_per_token, log_every
        self.peak = peak
        self.row: dict[str, Any] = {}
        self.last: dict[str, Any] = {}  # the newest value of every metric, for the progress bar
        self.seconds = 0.0  # time of earlier processes of this run
        self.paused = 0.0  # of which in validation and diagnostics
        self.processor = 0.0  # processor time of earlier processes, without validation and diagnostics
        self.compiling = 0.0  # seconds in torch.compile, of earlier processes
        self._first_step = self._window_step = 0
        self._compiled_before = self._window_compiled = compile_seconds()
        self._start = self._window_start = time.perf_counter()
        self._processor_start = time.process_time()

    def is_log_step(self, trainer: pl.Trainer, step: int) -> bool:
        return step % self.log_every == 0 or step == trainer.max_steps or step == 1

    def elapsed(self) -> float:
        """Seconds of training so far, earlier processes included, validation and diagnostics included."""
        return self.seconds + time.perf_counter() - self._start

    def processor_seconds(self) -> float:
        """Processor time of training so far: with one thread, what it takes where nothing else runs."""
        return self.processor + time.process_time() - self._processor_start

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for file in self.files:
            file.rewind(trainer.global_step or -1)  # a run that begins again probes its step 0 again
        replay([logger for logger in trainer.loggers if logger is not self.logger], self.folder)
        self._first_step = self._window_step = trainer.global_step
        self._compiled_before = self._window_compiled = compile_seconds()
        self._start = self._window_start = time.perf_counter()
        self._processor_start = time.process_time()
        self._measure_peak(trainer)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep what runs inside (validation, diagnostics) out of training time and tokens/s."""
        began, used, compiled = time.perf_counter(), time.process_time(), compile_seconds()
        yield
        seconds = time.perf_counter() - began
        self.paused += seconds
        self._window_start += seconds
        self._window_compiled += compile_seconds() - compiled  # of this pause: it is not taken off twice
        self._processor_start += time.process_time() - used

    def _measure_peak(self, trainer: pl.Trainer) -> None:
        if self.peak is not None and self.peak.due(trainer.global_step, trainer.max_steps):
            with self.pause():
                self.peak.measure()

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        step = trainer.global_step
        if self.is_log_step(trainer, step):
            mean = module.step_loss / trainer.accumulate_grad_batches
            loss = trainer.strategy.reduce(mean, reduce_op="mean").item()
            self.row |= {
                "train/loss": loss,
                "train/lr": module.step_lr,
                "train/grad_norm": float(module.grad_norm),
            }
            self._add_speed(step)
        elif step == self._first_step + 1:
            self._begin_window(step)
        if self.row or self.logger.pending:
            self.write(trainer, step)
            self._measure_peak(trainer)

    def _add_speed(self, step: int) -> None:
        """Put the speed since the last row into this one, and what compiling took."""
        seconds = time.perf_counter() - self._window_start - (compile_seconds() - self._window_compiled)
        if step > self._first_step + 1:
            speed = (step - self._window_step) * self.batch_tokens / max(1e-9, seconds)
            self.row["tokens_per_second"] = speed
            if self.peak is not None and self.peak.best is not None:
                self.row |= {"mfu": self.peak.share(speed * self.flops_per_token), "peak_flops": self.peak.best}
        if self.compile_total():
            self.row["compile_seconds"] = round(self.compile_total(), 3)
        self._begin_window(step)

    def _begin_window(self, step: int) -> None:
        self._window_step, self._window_start, self._window_compiled = step, time.perf_counter(), compile_seconds()

    def compile_total(self) -> float:
        """Seconds in torch.compile so far, earlier processes of this run included."""
        return self.compiling + compile_seconds() - self._compiled_before

    def write(self, trainer: pl.Trainer, step: int) -> None:
        """Write the collected row."""
        tokens, elapsed = step * self.batch_tokens, self.elapsed()
        row = {
            "step": step,
            "tokens": tokens,
            "seconds": round(elapsed, 3),
            "training_seconds": round(elapsed - self.paused, 3),  # without validation and diagnostics
            "flops": tokens * self.flops_per_token,
        }
        # Several threads wait for each other by spinning, and a GPU's work is not the processor's.
        if torch.get_num_threads() == 1 and trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu":
            row["processor_seconds"] = round(self.processor_seconds(), 3)
        row |= self.row
        self.last |= row
        self.metrics.append({**row, **self.logger.take()})
        for logger in trainer.loggers:
            if logger is not self.logger:
                logger.log_metrics(numbers_of(row), step=step)
        # What other callbacks may monitor (EarlyStopping, ModelCheckpoint), whoever measured it.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in numbers_of(row).items()})
        self.row = {}

    def flush(self) -> None:
        """Have everything on disk that belongs to the steps so far."""
        for file in self.files:
            file.flush()

    def state_dict(self) -> dict[str, Any]:
        times = {"seconds": self.elapsed(), "paused": self.paused, "processor": self.processor_seconds()}
        return times | {"compiling": self.compile_total()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.paused = state_dict["seconds"], state_dict.get("paused", 0.0)
        self.processor, self.compiling = state_dict.get("processor", 0.0), state_dict.get("compiling", 0.0)


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
    """Let this step be the run's last, for everything that happens after it."""
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
