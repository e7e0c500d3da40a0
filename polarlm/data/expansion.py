"""How far a compressed file may expand: a few kilobytes from a stranger must not fill the memory or the disk."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from polarlm.data.atomic import megabytes
from polarlm.errors import UserError

ALWAYS_ALLOWED = 1 << 30  # bytes; whatever the ratio, every machine that trains has room for them
LARGEST_RATIO = 200  # text reaches 3 to 10; what reaches more is one line again and again


class ExpandsTooFar(UserError):
    """A compressed file holds far more than its size lets expect."""


def allowed_bytes(path: Path, agreed: int | None = None) -> int:
    """To how many bytes a compressed file may expand; `agreed` is a size that the user named themselves."""
    return max(ALWAYS_ALLOWED, LARGEST_RATIO * path.stat().st_size, agreed or 0)


def allowed_in_memory(path: Path, agreed: int | None = None) -> int:
    """The same for what is unpacked into memory at once: also at most half of what the machine has."""
    allowed = allowed_bytes(path, agreed)
    if not hasattr(os, "sysconf"):  # Windows
        return allowed
    return min(allowed, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def require_allowed(path: Path, size: int, allowed: int, what_to_do: str) -> None:
    """Refuse a file whose content has, or says that it has, more than `allowed` bytes."""
    if size > allowed:
        raise ExpandsTooFar(
            f"{path} has {megabytes(path.stat().st_size)} and expands to at least {megabytes(size)}; allowed are "
            f"{megabytes(allowed)} ({megabytes(ALWAYS_ALLOWED)} or {LARGEST_RATIO} times its size, at once half of the "
            f"memory at most), because it could fill memory or disk. {what_to_do}"
        )


class Expanded(io.RawIOBase):
    """An opened compressed file that refuses to give out more than `allowed` bytes."""

    def __init__(self, file: Any, path: Path, allowed: int, what_to_do: str):
        self.file, self.path, self.allowed, self.what_to_do, self.size = file, path, allowed, what_to_do, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read on and count."""
        block = self.file.read(len(buffer))
        self.size += len(block)
        require_allowed(self.path, self.size, self.allowed, self.what_to_do)
        buffer[: len(block)] = block
        return len(block)
