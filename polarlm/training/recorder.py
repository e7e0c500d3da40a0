"""The record of a run's numbers: one row per step in metrics.jsonl, of which every logger gets a copy."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from lightning.pytorch.utilities import rank_zero_only

from polarlm.data.atomic import explained, write_beside
from polarlm.training.hardware import HardwarePeak, compile_seconds
from polarlm.training.loggers import numbers_of, own_step, replay

# What a run writes step by step: its metrics, what the probe saw, the texts sampled during training.
RECORDS = METRICS, PROBES, SAMPLES = "metrics.jsonl", "diagnostics/probe.jsonl", "diagnostics/samples.jsonl"


class JsonLines:
    """A .jsonl file with one object per step, append-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @rank_zero_only
    def append(self, row: dict[str, Any]) -> None:
        """Append one row; numbers that JSON does not know (nan, inf) are written as null."""
        row = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in row.items()}
        text = json.dumps(row) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with explained(self.path, lambda: len(text)), open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    @rank_zero_only
    def flush(self) -> None:
        """Have every row on disk, as a checkpoint that follows will be."""
        if self.path.exists():
            with explained(self.path), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop the rows after `step` (written after the checkpoint we continue from) and a torn last line."""
        if not self.path.exists():
            return
        kept, damaged = [], 0
        lines = self.path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += number < len(lines)  # the last one was being written
        if damaged:
            print(f"warning: {self.path}: {damaged} damaged lines are left out", file=sys.stderr, flush=True)
        write_beside(self.path, b"".join(line + b"\n" for line in kept))


class RowLogger(Logger):
    """Lightning's way into metrics.jsonl: what callbacks log joins the next row instead of becoming one."""

    name, version = "metrics", ""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[str, float] = {}
        self.complete = -1  # the step whose row already has what `self.log` was given

    @property
    def experiment(self) -> Any:
        return DummyExperiment()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if "epoch" in metrics and own_step(metrics, step) == self.complete:
            return
        self.pending |= {name: float(value) for name, value in metrics.items() if name != "epoch"}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds the hyperparameters."""

    def take(self) -> dict[str, float]:
        """The values logged since the last row, which are then cleared."""
        taken, self.pending = self.pending, {}
        return taken


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
            self.row |= {"train/loss": loss, "train/lr": module.step_lr, "train/grad_norm": float(module.grad_norm)}
            self._add_speed(step)
        elif step == self._first_step + 1:
            self._begin_window(step)
        connector = trainer._logger_connector
        if connector.should_update_logs:  # what callbacks gave to `self.log`; Lightning itself logs it after this row
            self.logger.log_metrics(connector.metrics["log"])
            self.logger.complete = step
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


class StepTimes(pl.Callback):
    """Splits the time of a logging step into data, forward, backward and optimiser.

    Only logging steps are watched: the others have no extra work, and on a GPU no synchronisation. Comes first among
    the callbacks, so that validation and probing are in none of the parts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.spent: dict[str, float] | None = None  # None: this step is not watched
        self._at = 0.0
        self._waiting: tuple[float, float] | None = None  # since when, and the recorder's pauses until then

    def _mark(self, module: Any, part: str) -> None:
        if self.spent is None:
            return
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        now = time.perf_counter()
        self.spent[part] = self.spent.get(part, 0.0) + now - self._at
        self._at = now

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_index: int) -> None:
        if batch_index % trainer.accumulate_grad_batches:
            self._mark(module, "data")
            return
        self.spent = None
        if self._waiting is not None:
            since, paused = self._waiting
            self._at = time.perf_counter()
            self.spent = {"data": self._at - since - (self.recorder.paused - paused)}

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._mark(module, "forward")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._mark(module, "backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        self._mark(module, "optimiser")

    def on_step_end(self, trainer: Any, module: Any) -> None:
        if self.spent is not None:
            self.recorder.row |= {f"time/{part}": round(seconds, 6) for part, seconds in self.spent.items()}
        watch = self.recorder.is_log_step(trainer, trainer.global_step + 1)
        self._waiting = (time.perf_counter(), self.recorder.paused) if watch else None
