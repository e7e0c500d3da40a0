"""Opening a run folder: it appears whole or not at all, belongs to one writer, and goes on only with what it began."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from polarlm.data import Corpus
from polarlm.data.atomic import flush_folder
from polarlm.errors import UserError
from polarlm.runs.environment import environment
from polarlm.runs.files import folder_beside, read_json, write_config, write_json
from polarlm.runs.folder import choose_folder
from polarlm.runs.lock import RunLock, lock_folder

ATTEMPTS = 20


def open_run(config: dict[str, Any], corpus: Corpus, parameters: int) -> tuple[Path, RunLock, bool]:
    """(folder, its lock, whether an earlier run goes on) for a configuration; other processes may try the same."""
    for _ in range(ATTEMPTS):
        folder, again, note = choose_folder(config)
        force = config["resume"] == "force"
        opened = lock_folder(folder, force=force) if again else _build(folder, config, corpus, parameters)
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
    with folder_beside(folder) as beside:
        lock = lock_folder(beside)
        try:
            corpus.tokenizer.save(beside / "tokenizer")
            write_json(beside / "corpus.json", corpus.describe())
            write_json(beside / "environment.json", environment())
            write_json(beside / "summary.json", {**_identity(folder, config, parameters), "status": "running"})
            write_config(beside / "config.yaml", config)
            os.rename(beside, folder)  # fails when a folder with content is there
        except OSError as error:
            lock.release()
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            return None
        flush_folder(folder.parent)
        lock.path = folder / lock.path.name
        return lock


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
