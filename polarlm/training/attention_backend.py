"""Which attention backend a run really uses: written into its folder, its loggers and, on a GPU, said aloud."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from polarlm.fast.backends import choices, forget_choices
from polarlm.runs.files import read_json, write_json


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
