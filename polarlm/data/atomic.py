"""Files that are either complete or absent, what identifies their content, and how far compressed ones may expand."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from polarlm.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Also a file where a folder should be, and places (/proc) where nobody can make one.
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


def write_beside(target: Path, content: bytes) -> None:
    """Write `content` to a neighbour of `target`, flush it to disk and rename it into place."""
    require_plain_file(target)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with explained(target, lambda: len(content)), replacing(target, beside), open(beside, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def replacing(target: Path, beside: Path) -> Iterator[None]:
    """Flush the file `beside` that is written inside and rename it to `target`; after a failure it is gone."""
    try:
        yield
        with open(beside, "rb+") as file:  # Windows flushes only what it may write
            os.fsync(file.fileno())
        os.replace(beside, target)
        flush_folder(target.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_sorted_json(target: Path, value: Any) -> None:
    """Write a value as readable JSON, atomically and with a stable order of keys."""
    write_beside(target, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def parse_json(text: str) -> Any:
    """A JSON value whose strings can be written again: half of a pair of surrogates is a ValueError."""
    value = json.loads(text)
    if "\\u" in text or "\\U" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def json_or_none(path: Path) -> Any:
    """The value in a JSON file; None where the file is missing or damaged."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def require_plain_file(target: Path) -> None:
    """Refuse to put a file in the place of a folder, a device or a pipe."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise UserError(
            f"{target} is a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}, not a file; give another name."
        )


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut; where folders cannot be flushed (Windows), do nothing."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Be the only process that makes `target`; says so where it has to wait for another one."""
    # The operating system frees the lock of a killed process by itself.
    lock = FileLock(f"{target}.lock")
    with explained(target):
        try:
            lock.acquire(timeout=1)
        except Timeout:
            print(f"{target.name} is being prepared by another process; waiting for it.", file=sys.stderr, flush=True)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def explained(target: Path, needed: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn a full or read-only disk into a sentence naming the file, what is needed and what is free."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise UserError(
                f"{error.filename or target} cannot be written: {error.strerror}. Choose another place (cache_dir=…, "
                "runs_dir=…) or change its permissions."
            ) from error
        if error.errno not in _FULL:
            raise
        bytes_needed = needed()
        wanted = "" if bytes_needed is None else f"about {megabytes(bytes_needed)} are needed, "
        raise UserError(
            f"The disk is full: {target} cannot be written; {wanted}{megabytes(free_bytes(target))} are free. Make "
            "room and give the same command again."
        ) from error


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def free_bytes(path: Path) -> int:
    """Free space on the disk that `path` lies on or would lie on."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


ALWAYS_ALLOWED = 1 << 30  # bytes; whatever the ratio, every machine that trains has room for them
LARGEST_RATIO = 200  # text reaches 3 to 10; what reaches more is one line again and again


class ExpandsTooFar(UserError):
    """A compressed file holds far more than its size lets expect."""


def allowed_bytes(path: Path, agreed: int | None = None) -> int:
    """To how many bytes a compressed file may expand; `agreed` is a size that the user named themselves."""
    return max(ALWAYS_ALLOWED, LARGEST_RATIO * path.stat().st_size, agreed or 0)


def allowed_in_memory(path: Path, agreed: int | None = None) -> int:
    """The same for what is unpacked into memory at once: also at most half of what the machine has."""
    allowed, memory = allowed_bytes(path, agreed), machine_memory()
    return allowed if memory is None else min(allowed, memory // 2)


def machine_memory() -> int | None:
    """Bytes of memory that this machine (or its container) has; None where nobody says."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(sizes)


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
