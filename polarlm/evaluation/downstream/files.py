"""The tasks' own files: local copies, never the network."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from polarlm.data.atomic import allowed_in_memory, require_allowed
from polarlm.data.hub import local_copy
from polarlm.errors import UserError


def task_file(name: str) -> Path:
    """The local copy of a task's file in data/raw or $POLARLM_SHARED_DATA."""
    copy = local_copy(name)
    if copy is None:
        raise UserError(
            f"{name} is neither in data/raw nor in the folder named by POLARLM_SHARED_DATA; put a copy there"
        )
    return copy


def _unpacked(path: Path) -> bytes:
    allowed = allowed_in_memory(path)
    with lzma.open(path, "rb") as file:
        raw = file.read(allowed + 1)
    require_allowed(path, len(raw), allowed, "Get the file from its source again.")
    return raw


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The objects of a .jsonl file (also .xz), at most `limit` of them, spread evenly over the file."""
    raw = _unpacked(path) if path.suffix == ".xz" else path.read_bytes()
    lines = [line for line in raw.decode().split("\n") if line.strip()]
    if limit is not None and limit < len(lines):
        lines = [lines[number * len(lines) // limit] for number in range(limit)]
    return [json.loads(line) for line in lines]
