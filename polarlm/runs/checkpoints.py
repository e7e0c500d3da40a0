"""Checkpoints that survive a kill at any moment, detect damage and never execute code when loaded.

checkpoints/step_00000300.ckpt    the last few; torch's zip format, every record with its checksum
checkpoints/shards/               what FSDP's processes wrote of them, each for itself (runs/shards.py)
checkpoints/last.ckpt             another name of the newest
checkpoints/best.ckpt             another name of the one with the lowest validation loss
checkpoints/model.safetensors     the finished model's weights (runs/restore.py)
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from safetensors import SafetensorError
from torch.utils._pytree import tree_map

from polarlm.data.atomic import explained, flush_folder, megabytes, replacing
from polarlm.errors import UserError
from polarlm.runs import shards
from polarlm.runs.shards import Shards
from polarlm.runs.tensor_files import DamagedCheckpoint, first_non_finite, tensors_of

LAST, BEST = "last.ckpt", "best.ckpt"


class SafeCheckpointIO(CheckpointIO):
    """Written beside, flushed, read back, renamed; loaded with weights_only=True and only when every bit is right.

    With `background`, `save_checkpoint` only copies the state to the CPU's memory; a thread does the rest, and whoever
    saved must `wait` before the file is given another name.
    """

    def __init__(self, *, background: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1, "polarlm-checkpoint") if background else None
        self._pending: Future[Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Replace `path` in one step, and only by a finite state that was read back whole."""
        if self._thread is None:
            write_checkpoint(checkpoint, Path(path))
        else:
            self.begin(write_checkpoint, copied_to_cpu(checkpoint), Path(path))

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Let the thread do this; one thing at a time."""
        assert self._thread is not None and self._pending is None
        self._pending = self._thread.submit(work, *arguments)

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._pending is None or self._pending.done()

    def wait(self) -> Any:
        """What the thread's work returned, or raised; None when there was none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load tensors and plain containers; anything else in the file, or a wrong bit, is refused."""
        return load_verified(Path(path), map_location=map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint file."""
        Path(path).unlink(missing_ok=True)


def copied_to_cpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The same state in tensors that training does not change; tied weights stay one tensor."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        if key not in copies:
            copies[key] = leaf.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map(copy, checkpoint)


def write_checkpoint(checkpoint: dict[str, Any], target: Path) -> None:
    """Replace `target` in one step, and only by a finite state that was read back whole."""
    if (name := first_non_finite(trained(checkpoint))) is not None:
        raise FloatingPointError(f"{name} is not finite: {target.name} was not written")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.tmp")
    with explained(target, lambda: sum(t.nbytes for _, t in tensors_of(checkpoint))), replacing(target, beside):
        with open(beside, "wb") as file:
            _write(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        verify_checksums(beside)
        load_checkpoint(beside, mmap=True)


def _write(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """torch.save; where the disk refuses, its writer hides that behind an error about positions: tell the first one."""
    refused: list[OSError] = []

    class Target:
        def write(self, content: Any) -> int:
            try:
                return file.write(content)
            except OSError as error:
                refused.append(error)
                raise

        def flush(self) -> None:
            file.flush()

    try:
        torch.save(checkpoint, Target())  # type: ignore[arg-type]
    except RuntimeError:
        if refused:
            raise refused[0] from None
        raise


def load_checkpoint(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a .ckpt safely, or say in one sentence why it can't be read."""
    require_uncompressed(path)
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint at {path}") from None
    except Exception as error:  # torch raises many types for damaged or unsafe files; all mean the same to a user
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DamagedCheckpoint(
            f"{path} can't be loaded as a checkpoint (damaged, or it holds more than tensors): {first}"
        ) from error


def load_verified(path: Path, *, map_location: Any = "cpu", keys: Iterable[str] = shards.PARTS) -> dict[str, Any]:
    """Read a checkpoint whose checksums are right and whose numbers are finite; whole tensors, whoever wrote it.

    Of a sharded one only the entries in `keys` are read, and only their shards are verified.
    """
    head = load_head(path, map_location=map_location)
    if "shards" not in head:
        return head
    sharded = Shards(path, head)
    sharded.verify([shards.PARTS[key] for key in keys])
    try:
        return sharded.assembled(*keys)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} does not fit its shards: {error}") from error


def load_head(path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read and verify the .ckpt file alone; a sharded one has marks where its tensors belong (runs/shards.py)."""
    if not path.exists():
        raise UserError(f"There is no checkpoint at {path}")
    verify_checksums(path)
    checkpoint = load_checkpoint(path, map_location=map_location, mmap=mmap)
    if not isinstance(checkpoint, dict):
        raise DamagedCheckpoint(f"{path} can't be loaded as a checkpoint: it holds no dictionary")
    if (name := first_non_finite(trained(checkpoint))) is not None:
        raise DamagedCheckpoint(f"{path} holds numbers that are not finite ({name})")
    return checkpoint


def verify_checkpoint(path: Path) -> None:
    """Read everything that a checkpoint consists of, never more than one file at a time."""
    head = load_head(path, mmap=True)
    if "shards" in head:
        Shards(path, head).verify()


def trained(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Weights and optimiser state of a checkpoint."""
    return {key: checkpoint[key] for key in shards.PARTS if key in checkpoint}


def require_uncompressed(path: Path) -> None:
    """Refuse records that are larger than their file: torch compresses none, but would unpack them into memory."""
    try:
        with zipfile.ZipFile(path) as records:
            size = sum(record.file_size for record in records.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError):
        return  # no such file, or none of torch's: who reads it says so
    if size > path.stat().st_size:
        raise DamagedCheckpoint(
            f"{path} has {megabytes(path.stat().st_size)} and would expand to {megabytes(size)}; checkpoints are not "
            "compressed, so it is not one of ours"
        )


def verify_checksums(path: Path) -> None:
    """Compare every record of the file with the checksum that was written with it."""
    require_uncompressed(path)
    try:
        with zipfile.ZipFile(path) as records:
            wrong = records.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpoint(f"{path} can't be loaded as a checkpoint (damaged, or none): {error}") from error
    if wrong is not None:
        raise DamagedCheckpoint(f"{path} is damaged: the checksum of {wrong} is wrong")


def step_file(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}.ckpt"


def step_files(folder: Path) -> list[Path]:
    """The checkpoints of single steps, newest first."""
    return sorted(folder.glob("step_*.ckpt"), reverse=True)


def remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Keep the `keep` newest steps up to `newest`, which is among them; what no checkpoint names goes as well."""
    files = step_files(folder)
    # Steps after this one are of a history that was left (a damaged checkpoint, a rewind).
    for old in [p for p in files if p > newest] + [p for p in files if p <= newest][keep:]:
        old.unlink(missing_ok=True)
    remove_unused_shards(folder)


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


def candidates(folder: Path) -> list[Path]:
    """The checkpoints that a run could go on from, newest first."""
    files = step_files(folder)
    last = folder / LAST
    return [last, *files] if last.exists() and not (files and last.samefile(files[0])) else files


def newest_usable(
    folder: Path, check: Callable[[Path], object] = verify_checkpoint, *, warn: bool = True
) -> Path | None:
    """The newest checkpoint that can be trusted, with a warning about every newer one; None when there is none."""
    paths = candidates(folder)
    for path in paths:
        try:
            check(path)
            return path
        except DamagedCheckpoint as error:
            if warn:
                print(f"warning: {error}; an earlier checkpoint is used", file=sys.stderr, flush=True)
    if paths:
        raise UserError(
            f"No checkpoint in {folder} can be used; delete that folder to train from the start, or restore it"
        )
    return None


def call_last(path: Path) -> None:
    """Let the checkpoint that a run goes on from be its last: one that was passed over as damaged must not stay that.

    Otherwise a kill after the next checkpoint is written, and before that is called the last, would leave it so.
    """
    last = path.with_name(LAST)
    if not (last.exists() and last.samefile(path)):
        give_name(path, last)


def remove_unused_shards(folder: Path) -> None:
    """Delete the shards that no checkpoint names: what is left of one that was killed or let go."""
    if not (folder / shards.FOLDER).exists():
        return
    used = set()
    for path in folder.glob("*.ckpt"):
        try:
            head = load_checkpoint(path, mmap=True)
        except UserError:
            return  # what a damaged file named is not known
        if "shards" in head:
            used.add(Shards(path, head).folder)
    for other in (folder / shards.FOLDER).iterdir():
        if other not in used:
            shards.remove_folder(other)
