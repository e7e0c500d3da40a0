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
from polarlm.runs.files import is_alive

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


def lock_folder(folder: Path, *, force: bool = False) -> RunLock:
    """Become the folder's only writer, or say who is; `force` overrules another machine that seems to be alive."""
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
    elsewhere = locked and not force and _lives_elsewhere(path, owner)
    if not locked or elsewhere:
        file.close()
        who = (
            f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
            if owner
            else "another process"
        )
        hint = "; if you are sure that it is gone, add resume=force" if elsewhere else ""
        raise UserError(f"{folder} is being written by {who}; wait for it, end it, or use another name=…{hint}")
    file.seek(0)
    file.truncate()
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "boot": boot_id(), "since": started}, file)
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


def is_locked(folder: Path) -> bool:
    """Whether a living process writes into this run folder."""
    try:
        import fcntl

        require_plain_file(folder / NAME)
        with (folder / NAME).open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows, no lock file, or a file system without locks
        return False
    return False


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
    """Whether a machine that does not share our locks wrote lately; within one boot the kernel's lock is right."""
    boot = boot_id()
    same_machine = owner.get("host") == socket.gethostname() or (boot is not None and owner.get("boot") == boot)
    silent = time.time() - path.stat().st_mtime
    return bool(owner) and not same_machine and silent < SIGN_OF_LIFE_SECONDS


def boot_id() -> str | None:
    """What all containers of this machine have in common until it starts again; None where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
