"""Ctrl-C, SIGTERM and SIGUSR1 stop a run between two steps, with a checkpoint from which it continues bit for bit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl

from polarlm.runs.lock import RunLock

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
