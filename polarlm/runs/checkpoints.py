"""Checkpoints that survive a kill at any moment, notice damage, and never execute code when loaded.

checkpoints/step_00000300.ckpt    the last few; torch's zip format, every record with its checksum
checkpoints/last.ckpt             another name of the newest
checkpoints/best.ckpt             another name of the one with the lowest validation loss
checkpoints/model.safetensors     the finished model's weights (runs/restore.py)
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from polarlm.data.atomic import explained, flush_folder
from polarlm.errors import UserError

LAST, BEST = "last.ckpt", "best.ckpt"


class DamagedCheckpoint(UserError):
    """A file that is there but can't be trusted."""


class SafeCheckpointIO(CheckpointIO):
    """Written beside, flushed, read back, renamed; loaded with weights_only=True and only when every bit is right."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Replace `path` in one step, and only by a finite state that was read back whole."""
        target = Path(path)
        if (name := first_non_finite(checkpoint)) is not None:
            raise FloatingPointError(f"{name} is not finite: {target.name} was not written")
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.tmp")
        with explained(target, lambda: sum(t.nbytes for _, t in tensors_of(checkpoint))):
            try:
                with open(beside, "wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                verify_checksums(beside)
                load_checkpoint(beside, mmap=True)
                os.replace(beside, target)
                flush_folder(target.parent)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain containers; anything else in the file, or a wrong bit, is refused."""
        return load_verified(Path(path), map_location=map_location or "cpu")

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
        raise DamagedCheckpoint(
            f"{path} can't be loaded as a checkpoint (damaged, or it holds more than tensors): {first}"
        ) from error


def load_verified(path: Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a .ckpt whose checksums are right and whose numbers are finite."""
    if not path.exists():
        raise UserError(f"There is no checkpoint at {path}")
    verify_checksums(path)
    checkpoint = load_checkpoint(path, map_location=map_location)
    if (name := first_non_finite(checkpoint)) is not None:
        raise DamagedCheckpoint(f"{path} holds numbers that are not finite ({name})")
    return checkpoint


def verify_checksums(path: Path) -> None:
    """Compare every record of the file with the checksum that was written with it."""
    try:
        with zipfile.ZipFile(path) as records:
            wrong = records.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpoint(f"{path} can't be loaded as a checkpoint (damaged, or none): {error}") from error
    if wrong is not None:
        raise DamagedCheckpoint(f"{path} is damaged: the checksum of {wrong} is wrong")


def tensors_of(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor in nested containers."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensors_of(value, f"{name}[{number}]")


def first_non_finite(checkpoint: dict[str, Any]) -> str | None:
    """The name of the first tensor of weights or optimiser state with a nan or an infinity."""
    parts = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    for name, tensor in tensors_of(parts):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def step_file(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}.ckpt"


def step_files(folder: Path) -> list[Path]:
    """The checkpoints of single steps, newest first."""
    return sorted(folder.glob("step_*.ckpt"), reverse=True)


def give_name(source: Path, name: Path) -> None:
    """Let `name` be another name of `source`, in one step; a copy where the file system knows no second names."""
    beside = name.with_name(f".{name.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:
        with explained(name):
            shutil.copyfile(source, beside)
    os.replace(beside, name)
    flush_folder(name.parent)


def newest_usable(folder: Path) -> Path | None:
    """The newest checkpoint that can be trusted, with a warning about every newer one; None when there is none."""
    candidates = step_files(folder)
    last = folder / LAST
    if last.exists() and not (candidates and last.samefile(candidates[0])):
        candidates.insert(0, last)
    for path in candidates:
        try:
            load_verified(path)
            return path
        except DamagedCheckpoint as error:
            print(f"warning: {error}; an earlier checkpoint is used", file=sys.stderr, flush=True)
    if candidates:
        raise UserError(
            f"No checkpoint in {folder} can be used; delete that folder to train from the start, or restore it"
        )
    return None
