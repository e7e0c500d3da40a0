"""Files that are either complete or absent (written beside, flushed, renamed), and what identifies their content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_beside(target: Path, content: bytes) -> None:
    """Write `content` to a neighbour of `target`, flush it to disk and rename it into place."""
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, target)


def write_json(target: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically and with a stable order of keys."""
    write_beside(target, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
