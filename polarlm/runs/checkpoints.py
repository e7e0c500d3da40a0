"""Checkpoints that survive a kill at any moment and never execute code when loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from polarlm.errors import UserError


class SafeCheckpointIO(CheckpointIO):
    """Written beside, flushed, read back, renamed; loaded with weights_only=True."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Replace `path` in one step, and only by a file that was read back whole."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.tmp")
        with open(beside, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        load_checkpoint(beside, mmap=True)
        os.replace(beside, target)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain containers; anything else in the file is refused."""
        return load_checkpoint(Path(path), map_location=map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint file."""
        Path(path).unlink(missing_ok=True)


def load_checkpoint(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a .ckpt safely, or say in one sentence why it can't be read."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint at {path}") from None
    except Exception as error:  # torch raises many types for damaged or unsafe files; all mean the same to a user
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path} can't be loaded as a checkpoint (damaged, or it holds more than tensors): {first}"
        ) from error
