"""Opening a run folder: it appears whole or not at all, belongs to one writer, and goes on only with what it began."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from polarlm.data import Corpus
from polarlm.data.atomic import explained, flush_folder
from polarlm.errors import UserError
from polarlm.runs.environment import environment
from polarlm.runs.files import read_json, write_json, write_text
from polarlm.runs.folder import choose_folder
from polarlm.runs.lock import RunLock, is_alive, lock_folder

ATTEMPTS = 20
ABANDONED_AFTER_SECONDS = 3600


def open_run(config: dict[str, Any], corpus: Corpus, parameters: int) -> tuple[Path, RunLock, bool]:
    """(folder, its lock, whether an earlier run goes on) for a configuration; other processes may try the same."""
    for _ in range(ATTEMPTS):
        folder, again, note = choose_folder(config)
        opened = lock_folder(folder) if again else _build(folder, config, corpus, parameters)
        if opened is None:
            continue  # another process was faster: look again
        if again:
            try:
                if choose_folder(config)[:2] != (folder, True):  # it finished while we waited
                    opened.release()
                    continue
                check_continuation(folder, corpus)
                _remove_unfinished_files(folder)
            except BaseException:
                opened.release()
                raise
            summary = read_json(folder / "summary.json") or {}
            write_json(
                folder / "summary.json", {**_identity(folder, config, parameters), **summary, "status": "running"}
            )
        if note:
            print(note, file=sys.stderr)
        return folder, opened, again
    raise UserError(f"{folder} keeps being taken by other processes; give this run another name=…")


def _remove_unfinished_files(folder: Path) -> None:
    """What a killed process was writing; whoever holds the lock is the only writer."""
    for place in (folder, folder / "checkpoints", folder / "diagnostics", folder / "tokenizer"):
        for left in () if place.is_symlink() else place.glob("*.tmp"):  # a link may lead to other people's files
            left.unlink(missing_ok=True)


def _identity(folder: Path, config: dict[str, Any], parameters: int) -> dict[str, Any]:
    parts = {"name": folder.name, "block": config["choices"]["block"], "group": config["group"], "seed": config["seed"]}
    return {**parts, "parameters": parameters}


def _build(folder: Path, config: dict[str, Any], corpus: Corpus, parameters: int) -> RunLock | None:
    """Write the folder beside its place, lock it and move it there; None when the place was taken meanwhile."""
    _clean_up(folder)
    # The number of a killed process can be ours now (in a container it usually is), so a number is not enough.
    beside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.randbelow(10**9)}.new")
    with explained(folder):
        beside.mkdir(parents=True)
    try:
        lock = lock_folder(beside)
        corpus.tokenizer.save(beside / "tokenizer")
        write_json(beside / "corpus.json", corpus.describe())
        write_json(beside / "environment.json", environment())
        write_json(beside / "summary.json", {**_identity(folder, config, parameters), "status": "running"})
        write_text(beside / "config.yaml", yaml.dump(config, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True))
        try:
            os.rename(beside, folder)  # fails when a folder with content is there
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            lock.release()
            shutil.rmtree(beside, ignore_errors=True)
            return None
        flush_folder(folder.parent)
        lock.path = folder / lock.path.name
        return lock
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


class _PlainDumper(yaml.SafeDumper):
    """Without aliases, which readers of a run folder refuse."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _clean_up(folder: Path) -> None:
    """Remove what killed processes began to build in this place."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.new"):
        pid = left.name.rsplit(".", 2)[1].partition("-")[0]
        gone = pid.isdigit() and not is_alive(int(pid))
        with contextlib.suppress(OSError):
            if gone or time.time() - left.stat().st_mtime > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def check_continuation(folder: Path, corpus: Corpus) -> None:
    """Refuse to go on with other data; warn about another code or torch version and record it."""
    recorded, now = read_json(folder / "corpus.json") or {}, corpus.describe()
    for what in ("fingerprint", "content"):
        if recorded.get(what) is not None and recorded[what] != now[what]:
            raise UserError(
                f"The corpus or its tokenizer has changed since {folder} was begun ({what} {recorded[what]}, now "
                f"{now[what]}); restore the data, or start a new run with another name=…"
            )
    before, here = read_json(folder / "environment.json") or {}, environment()
    versions: Any = before.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    changed = [
        f"{name} {old} → {new}"
        for name, old, new in (
            ("torch", versions.get("torch"), here["versions"]["torch"]),
            ("polarlm", versions.get("polarlm"), here["versions"]["polarlm"]),
            ("code", before.get("git_commit"), here["git_commit"]),
        )
        if old is not None and old != new
    ]
    if changed:
        print(f"warning: {folder} goes on with another version ({'; '.join(changed)})", file=sys.stderr)
    earlier = before.pop("earlier", [])
    earlier = earlier if isinstance(earlier, list) else []
    write_json(folder / "environment.json", {**here, "earlier": [*earlier, before] if before else earlier})
