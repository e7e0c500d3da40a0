"""The progress of training: one live bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from polarlm.printing import clock, short
from polarlm.training.recorder import Recorder

LINE_SECONDS = 5.0  # without a terminal: at most one line in this time


ORDER = ("tokens", "loss", "lr", "speed", "mfu", "val", "left")  # as read
NEEDED = ("left", "loss", "val", "speed", "mfu", "tokens", "lr")  # the last is the first to go when a line is too short


def fitting_parts(parts: dict[str, str], width: int | None) -> str:
    """The parts in their order, without the less needed ones if they would not fit the width."""
    kept = [name for name in NEEDED if name in parts]
    while True:
        text = "  ".join(parts[name] for name in ORDER if name in kept)
        if width is None or len(text) <= width or len(kept) == 1:
            return text
        kept.pop()


def bar_width(columns: int) -> int:
    """How much of a line the bar itself takes."""
    return min(24, max(4, columns // 8))


class Progress(ProgressBar):
    """Step, tokens, loss, learning rate, tokens/s, time left; a second bar while validating."""

    def __init__(self, recorder: Recorder, batch_tokens: int) -> None:
        super().__init__()
        self.recorder, self.batch_tokens = recorder, batch_tokens
        self.live: Any = None
        self.console: Any = None
        self.training: Any = None
        self.validating: Any = None
        self._start = self._line_at = 0.0
        self._first_step = 0
        self._val_seen: int | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._start, self._first_step = time.perf_counter(), trainer.global_step
        if trainer.global_rank == 0 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self.console = Console(stderr=True)
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=bar_width(self.console.width)),
                TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
            )
            self.live = Progress(*columns, console=self.console)
            self.training = self.live.add_task("train", total=trainer.max_steps, completed=trainer.global_step, text="")
            self.live.start()

    def _text(self, step: int, total: int, width: int | None = None) -> str:
        last = self.recorder.last
        trained = time.perf_counter() - self._start
        left = trained / max(1, step - self._first_step) * (total - step)
        parts = {"left": f"left {clock(left)}", "tokens": f"{short(step * self.batch_tokens)} tokens"}
        if "train/loss" in last:
            parts["loss"] = f"loss {last['train/loss']:.3f}"
            parts["lr"] = f"lr {last['train/lr']:.1e}"
        if last.get("tokens_per_second"):
            parts["speed"] = f"{short(last['tokens_per_second'])} tok/s"
        if last.get("mfu"):
            parts["mfu"] = f"mfu {last['mfu']:.0%}"
        if "val/loss" in last:
            parts["val"] = f"val {last['val/loss']:.3f}"
        return fitting_parts(parts, width)

    def _bar_text(self, step: int, total: int) -> str:
        # The line is "train ━━━━ 12/1200 " and then the text.
        width = self.console.width
        taken = len("train") + 1 + bar_width(width) + 1 + len(f"{step}/{total}") + 1
        return self._text(step, total, width - taken)

    def on_step_end(self, trainer: Any, module: Any) -> None:
        step, total = trainer.global_step, trainer.max_steps
        if trainer.global_rank != 0:
            return
        if self.live:
            if self.validating is not None:
                self.live.remove_task(self.validating)
                self.validating = None
            self.live.update(self.training, completed=step, text=self._bar_text(step, total))
            return
        now = time.perf_counter()
        validated = self.recorder.last.get("val/loss")
        news = validated != self._val_seen
        if now - self._line_at >= LINE_SECONDS or news or step == total:
            self._line_at, self._val_seen = now, validated
            print(f"step {step}/{total}  {self._text(step, total)}", file=sys.stderr, flush=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.live:
            loop = trainer.fit_loop.epoch_loop.val_loop
            if self.validating is None:
                self.validating = self.live.add_task("val", total=sum(loop.max_batches), text="")
            self.live.update(self.validating, completed=loop.batch_progress.current.processed)

    def close(self) -> None:
        """Give the terminal back."""
        if self.live:
            self.live.stop()
            self.live = None

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.close()
