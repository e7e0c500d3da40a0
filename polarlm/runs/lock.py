"""One writer per run folder.

The operating system holds the lock and drops it with the process, however that ends: a killed run leaves no lock
behind. The file names its owner for people, and for machines that share a disk but not its locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from polarlm.data.atomic import explained, require_plain_file
from polarlm.errors import UserError

NAME = "run.lock"
# Locks of some network file systems hold on one machine only: a sign of life of another machine counts so long.
SIGN_OF_LIFE_SECONDS = 15 * 60
# Seconds to wait for a writer that is about to end. Set for the jobs of a sweep: when a killed sweep is started again
# at once, its old job may still be saving its state.
PATIENCE_VARIABLE = "POLARLM_LOCK_PATIENCE"


class RunLock:
    """The right to write into a run folder, until `release` or the end of the process."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self._file = path, file

    def touch(self) -> None:
        """A sign of life."""
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno())

    def release(self) -> None:
        """Give the folder free."""
        with contextlib.suppress(OSError, ValueError):
            self._file.truncate(0)
        self._file.close()


def lock_folder(folder: Path) -> RunLock:
    """Become the folder's only writer, or say who is."""
    path = folder / NAME
    if path.is_symlink():
        raise UserError(f"{path} is a link to another file, which would be overwritten; delete it")
    with explained(path):
        require_plain_file(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    patience = time.monotonic() + float(os.environ.get(PATIENCE_VARIABLE, 0))
    while not (locked := _try_lock(file)) and time.monotonic() < patience:
        time.sleep(0.2)
    owner = _owner(file)
    if not locked or _lives_elsewhere(path, owner):
        file.close()
        who = (
            f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
            if owner
            else "another process"
        )
        raise UserError(
            f"{folder} is being written by {who}; wait for it, end it, or use another name=… "
            f"(if you are sure that it is gone, delete {path})"
        )
    file.seek(0)
    file.truncate()
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": started}, file)
    file.flush()
    return RunLock(path, file)


def writer_is_gone(folder: Path) -> bool:
    """Whether the process that wrote here last was on this machine and was killed; takes no lock, disturbs nobody."""
    path = folder / NAME
    try:
        with path.open(encoding="utf-8") as file:
            owner = _owner(file)
    except OSError:
        return False
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("pid"), int) or os.name != "posix":
        return False
    return not is_alive(owner["pid"])


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # and somebody else's
    return True


def _try_lock(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            return True
        except OSError:
            return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the owner's name has to do
        return True


def _owner(file: IO[str]) -> dict[str, Any]:
    try:
        owner = json.loads(file.read() or "{}")
    except (ValueError, OSError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _lives_elsewhere(path: Path, owner: dict[str, Any]) -> bool:
    silent = time.time() - path.stat().st_mtime
    return bool(owner) and owner.get("host") != socket.gethostname() and silent < SIGN_OF_LIFE_SECONDS
