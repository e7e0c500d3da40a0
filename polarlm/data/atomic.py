"""Files that are either complete or absent (written beside, flushed, renamed), and what identifies their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
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


def json_or_none(path: Path) -> Any:
    """The value in a JSON file; None where the file is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
