"""What happens around a step: seeding, validation, the one metrics row, the checkpoint; in this order.

Validation runs here and not in Lightning's loop because Lightning saves a step's checkpoint *before* that step's
validation: a kill in between would lose the point for ever. Here the row is on disk before the checkpoint is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch

from polarlm.evaluation.metrics import measure
from polarlm.evaluation.tally import tally_batches
from polarlm.evaluation.text_size import text_size
from polarlm.training.loggers.json_lines import JsonLines
from polarlm.training.loggers.throughput import HardwarePeak


class StepSeed(pl.Callback):
    """Random numbers (dropout) are a function of (seed, step, micro-batch, rank): a resumed run draws the same ones."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_index: int
    ) -> None:
        micro = batch_index % trainer.accumulate_grad_batches
        torch.manual_seed((((self.seed * 1_000_003 + trainer.global_step) * 1009) + trainer.global_rank) * 1009 + micro)


class Recorder(pl.Callback):
    """Collects what the other callbacks found at a step and writes it as one row to every logger."""

    def __init__(
        self, *, batch_tokens: int, flops_per_token: int, log_every: int, peak: HardwarePeak | None = None
    ) -> None:
        self.batch_tokens, self.flops_per_token, self.log_every = batch_tokens, flops_per_token, log_every
        self.peak = peak
        self.row: dict[str, Any] = {}
        self.last: dict[str, Any] = {}  # the newest value of every metric, for the progress bar
        self.seconds = 0.0  # time of earlier processes of this run
        self.paused = 0.0  # of which in validation and diagnostics
        self.processor = 0.0  # processor time of earlier processes, without validation and diagnostics
        self._window_step = 0
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
        for logger in trainer.loggers:
            if isinstance(logger, JsonLines):
                logger.rewind(trainer.global_step)
        self._window_step = trainer.global_step
        self._start = self._window_start = time.perf_counter()
        self._processor_start = time.process_time()
        self._measure_peak(trainer)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep what runs inside (validation, diagnostics) out of training time and tokens/s."""
        began, used = time.perf_counter(), time.process_time()
        yield
        seconds = time.perf_counter() - began
        self.paused += seconds
        self._window_start += seconds
        self._processor_start += time.process_time() - used

    def _measure_peak(self, trainer: pl.Trainer) -> None:
        if self.peak is not None and self.peak.due(trainer.global_step, trainer.max_steps):
            with self.pause():
                self.peak.measure()

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        step = trainer.global_step
        loss, module.step_loss = module.step_loss, None
        if self.is_log_step(trainer, step):
            loss = trainer.strategy.reduce(loss / trainer.accumulate_grad_batches, reduce_op="mean").item()
            now = time.perf_counter()
            speed = (step - self._window_step) * self.batch_tokens / max(1e-9, now - self._window_start)
            self._window_step, self._window_start = step, now
            self.row |= {
                "train/loss": loss,
                "train/lr": module.step_lr,
                "train/grad_norm": float(module.grad_norm),
                "tokens_per_second": speed,
            }
            if self.peak is not None and self.peak.best is not None:
                self.row |= {"mfu": self.peak.share(speed * self.flops_per_token), "peak_flops": self.peak.best}
        if self.row:
            self.write(trainer, step)
            self._measure_peak(trainer)

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
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)
        self.row = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.elapsed(), "paused": self.paused, "processor": self.processor_seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.paused = state_dict["seconds"], state_dict.get("paused", 0.0)
        self.processor = state_dict.get("processor", 0.0)


class Validation(pl.Callback):
    """Every `every` steps on part of the validation split; at the last step on every evaluation split, whole."""

    def __init__(
        self, recorder: Recorder, *, every: int, on_progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.recorder, self.every, self.on_progress = recorder, every, on_progress

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether this step is validated."""
        return trainer.global_step == trainer.max_steps or bool(self.every and trainer.global_step % self.every == 0)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        step = trainer.global_step
        if step == trainer.max_steps:
            for split in trainer.datamodule.corpus.splits:  # type: ignore[attr-defined]
                if split != "train":
                    self._run(trainer, module, split, whole=True)
        elif self.every and step % self.every == 0:
            self._run(trainer, module, "val", whole=False)

    def _run(self, trainer: Any, module: Any, split: str, *, whole: bool) -> None:
        data = trainer.datamodule
        loader = data.eval_dataloader(split, whole=whole)
        done, total = 0, len(loader)

        def on_batch() -> None:
            nonlocal done
            done += 1
            if self.on_progress:
                self.on_progress(split, done, total)

        with self.recorder.pause():
            counted = tally_batches(
                module.model,
                loader,
                text_size(data.corpus.store(split), data.corpus.tokenizer, None if whole else data.eval_tokens),
                device=module.device,
                precision=trainer.strategy.precision_plugin.forward_context(),
                reduce=lambda totals: trainer.strategy.reduce(totals, reduce_op="sum"),
                on_batch=on_batch,
            )
        self.recorder.row |= {f"{split}/{name}": value for name, value in measure(counted).items()}
