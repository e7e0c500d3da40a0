"""Tensors in safetensors files with a checksum: written atomically, read only if the checksum is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from polarlm.data.atomic import explained, replacing
from polarlm.errors import UserError

CHECKSUM = "sha256"  # in the file's metadata


class DamagedCheckpoint(UserError):
    """A file that is there but can't be trusted."""


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """Write a file beside, flush it and rename it into place; returns the checksum that is in it."""
    from safetensors.torch import save

    digest = checksum(tensors)
    beside = path.with_name(f".{path.name}.tmp")
    size = sum(t.nbytes for t in tensors.values())
    # Not save_file: it has a temporary file of its own, which a kill would leave, and hides why it could not write.
    with explained(path, lambda: size), replacing(path, beside), open(beside, "wb") as file:
        file.write(save(tensors, metadata={CHECKSUM: digest}))
    return digest


def read_tensors(path: Path, expected: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file whose checksum is right (and the expected one) and whose numbers are finite."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, framework="pt") as file:
            recorded = (file.metadata() or {}).get(CHECKSUM)
        tensors = load_file(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from error
    recorded = recorded if expected is None else expected
    if recorded is not None and recorded != checksum(tensors):
        raise DamagedCheckpoint(f"{path} is damaged: its checksum is wrong")
    if (name := first_non_finite(tensors)) is not None:
        raise DamagedCheckpoint(f"{path} holds numbers that are not finite ({name})")
    return tensors


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def first_non_finite(tree: Any) -> str | None:
    """The name of the first tensor with a nan or an infinity."""
    for name, tensor in tensors_of(tree):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
