"""Checkpoints that several processes write together (FSDP): each process writes its own rows.

checkpoints/step_00000300.ckpt                                 everything else, and the checksums of
checkpoints/shards/step_00000300/weights_00001.safetensors     process 1's rows of every weight
checkpoints/shards/step_00000300/optimiser_00001.safetensors   and of every tensor of the optimiser's state

The .ckpt is written last, so a checkpoint is complete or absent. `last.ckpt` and `best.ckpt` are other names of that
small file. In it, a tensor that is stored in the shards is {"sharded": its name there}. Processes hold rows in the
order of their numbers, so a whole tensor is its pieces one below the other.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from polarlm.runs.tensor_files import DamagedCheckpoint, first_non_finite, read_tensors, write_tensors

FOLDER = "shards"
PARTS = {"state_dict": "weights", "optimizer_states": "optimiser"}  # key of a checkpoint → name of its files
NAME = re.compile(r"step_[0-9]{8,}(\.[0-9]+)?")
MARK = "sharded"

Local = Callable[[torch.Tensor], torch.Tensor | None]  # this process's rows of a tensor, None for one that all hold
Parts = dict[str, dict[str, torch.Tensor]]


def take_apart(checkpoint: dict[str, Any], local: Local) -> tuple[dict[str, Any], Parts]:
    """(the checkpoint with marks in the place of sharded tensors, this process's rows by part and name)."""
    parts: Parts = {part: {} for part in PARTS.values()}
    head = dict(checkpoint)
    for key, part in PARTS.items():
        names: dict[int, str] = {}  # a tied weight has two names and is stored once

        def mark(tensor: Any, name: str, part: str = part, names: dict[int, str] = names) -> Any:
            rows = local(tensor) if isinstance(tensor, torch.Tensor) else None
            if rows is None:
                return tensor
            if id(tensor) not in names:
                names[id(tensor)] = name
                # A copy: safetensors refuses views of a larger storage, and the shards of FSDP are such.
                parts[part][name] = rows.detach().to("cpu", copy=True).contiguous()
            return {MARK: names[id(tensor)]}

        if key in head:
            head[key] = replace_leaves(head[key], mark)
    return head, parts


def replace_leaves(tree: Any, change: Callable[[Any, str], Any], path: tuple[str, ...] = ()) -> Any:
    """The same containers with every leaf replaced by change(leaf, its path); a mark is a leaf."""
    if isinstance(tree, dict) and tree.keys() != {MARK}:
        return {key: replace_leaves(value, change, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(replace_leaves(value, change, (*path, str(i))) for i, value in enumerate(tree))
    return change(tree, "/".join(path))


def write_rows(folder: Path, process: int, parts: Parts) -> dict[str, str]:
    """Write one process's files, and read them back; returns their checksums by part."""
    if (name := first_non_finite(parts)) is not None:
        raise FloatingPointError(f"{name} is not finite: {folder.name}.ckpt was not written")
    checksums = {}
    for part, tensors in parts.items():
        path = folder / file_name(part, process)
        checksums[part] = write_tensors(tensors, path)
        read_tensors(path, checksums[part])
    return checksums


def file_name(part: str, process: int) -> str:
    """What the file of a process is called."""
    return f"{part}_{process:05d}.safetensors"


class Shards:
    """The shards of one checkpoint. Nothing that its .ckpt says is used as a path."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        described = head["shards"]
        try:
            name, self.checksums = described["folder"], {part: list(described[part]) for part in PARTS.values()}
            counts = {len(sums) for sums in self.checksums.values()}
            if not NAME.fullmatch(name) or len(counts) != 1 or 0 in counts:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise DamagedCheckpoint(f"{path} does not say which shards belong to it") from None
        self.path, self.head, self.processes = path, head, counts.pop()
        self.folder = path.parent / FOLDER / name
        self.opened: dict[str, list[Any]] = {}

    def verify(self, parts: Iterable[str] = PARTS.values(), processes: Iterable[int] | None = None) -> None:
        """Read the files of these parts and processes and compare them with their checksums, one at a time."""
        for part, process in itertools.product(parts, range(self.processes) if processes is None else processes):
            read_tensors(self.folder / file_name(part, process), self.checksums[part][process])

    def rows(self, part: str, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows begin … end of a tensor, from the files that have them; to be verified before."""
        pieces, first = [], 0
        for file in self._files(part):
            piece = file.get_slice(name)
            count = piece.get_shape()[0]
            wanted = max(begin - first, 0), min(end - first, count)
            if wanted[0] < wanted[1]:
                pieces.append(piece[wanted[0] : wanted[1]])
            first += count
        if not 0 <= begin <= end <= first:
            raise DamagedCheckpoint(f"{self.path} has {first} rows of {name}, not {end}")
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else self._files(part)[0].get_slice(name)[0:0]

    def whole(self, part: str, name: str) -> torch.Tensor:
        """A tensor with all its rows."""
        return self.rows(part, name, 0, sum(file.get_slice(name).get_shape()[0] for file in self._files(part)))

    def assembled(self, *keys: str) -> dict[str, Any]:
        """The checkpoint as one process would have written it, with these of its sharded entries."""
        return {
            **{key: value for key, value in self.head.items() if key != "shards" and key not in PARTS},
            **{key: self._filled(self.head[key], PARTS[key]) for key in keys if key in self.head},
        }

    def _filled(self, tree: Any, part: str) -> Any:
        known: dict[str, torch.Tensor] = {}  # both names of a tied weight get one tensor

        def fill(leaf: Any, _: str) -> Any:
            if not isinstance(leaf, dict):
                return leaf
            if leaf[MARK] not in known:
                known[leaf[MARK]] = self.whole(part, leaf[MARK])
            return known[leaf[MARK]]

        return replace_leaves(tree, fill)

    def _files(self, part: str) -> list[Any]:
        from safetensors import safe_open

        if part not in self.opened:
            paths = [self.folder / file_name(part, process) for process in range(self.processes)]
            self.opened[part] = [safe_open(path, framework="pt").__enter__() for path in paths]
        return self.opened[part]


def new_folder(checkpoints: Path, step_name: str) -> Path:
    """An empty folder for the shards of a step; an older one of the same step may still be in use."""
    for number in itertools.count():
        folder = checkpoints / FOLDER / (f"{step_name}.{number}" if number else step_name)
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def remove_folder(folder: Path) -> None:
    """Delete shards, and the folder of all shards when these were the last."""
    for file in folder.iterdir():
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another one is left in it
        folder.rmdir()
        folder.parent.rmdir()
