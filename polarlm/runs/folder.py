"""Chooses, creates and opens the folder of a run.

A folder is created atomically, has one writer, and resumes only with the settings and data it was started with.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.data.atomic import flush_folder
from polarlm.errors import UserError
from polarlm.runs.files import folder_beside, json_object, read_config, read_json, write_config, write_json
from polarlm.runs.identity import default_name, differences, experiment_of, identity_of, run_folders
from polarlm.runs.lock import RunLock, lock_folder

if TYPE_CHECKING:
    from polarlm.data import Corpus

# -- a new folder, or the unfinished one of the same settings ---------------------------------------------------------


def choose_folder(config: dict[str, Any]) -> tuple[Path, bool, str | None]:
    """(folder, continue?, a sentence for the user) for a configuration.

    A finished run is never overwritten: the next one goes to `<name>-2`, `-3`, …
    An unfinished one is continued unless `resume=never`, when its settings are the same, whatever sweep has named it.
    """
    name = config["name"] or default_name(config)
    if config["resume"] != "never" and (begun := _begun_elsewhere(config)):
        return begun, True, None
    if not re.fullmatch(r"[\w+=@-][\w.+=@ -]*", str(name)):
        raise UserError(
            f"name={name!r} must be one folder name: letters, digits, and any of . _ - + = @, not beginning with a dot"
        )
    taken: Path | None = None
    for number in range(1, 10_000):
        folder = Path(config["runs_dir"]) / (str(name) if number == 1 else f"{name}-{number}")
        if not (folder / "config.yaml").exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"{folder} exists but is not a run folder (no config.yaml); choose another name=…")
            note = f"{taken} exists: this run goes to {folder}" if taken else None
            return folder, False, note
        finished = (read_json(folder / "summary.json") or {}).get("status") == "finished"
        if not finished and config["resume"] != "never":
            old = read_config(folder / "config.yaml")
            changed = differences(experiment_of(old), experiment_of(config))
            if not changed:
                return folder, True, None
            raise UserError(
                f"{folder} holds an unfinished run with other settings ({'; '.join(changed[:5])}). "
                "Use its settings to continue it, another name=… for a new run, or resume=never to start beside it"
            )
        taken = folder
    raise UserError(f"No free folder for name={name!r} in {config['runs_dir']}")


def _begun_elsewhere(config: dict[str, Any]) -> Path | None:
    """The unfinished run of this identity whose derived name differs: begun in another sweep, or by hand."""
    identity = identity_of(config)
    ending = f"-{identity[:6]}"
    if config["name"] is not None and not str(config["name"]).endswith(ending):
        return None  # a name that the user chose
    for folder, other in run_folders(config["runs_dir"], f"*{ending}*"):
        is_derived = re.fullmatch(rf".*{ending}(-\d+)?", folder.name)
        if other == identity and is_derived and json_object(folder / "summary.json").get("status") != "finished":
            return folder
    return None


# -- opening it -------------------------------------------------------------------------------------------------------


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
        print(f"warning: {folder} resumes with another version ({'; '.join(changed)})", file=sys.stderr)
    earlier = before.pop("earlier", [])
    earlier = earlier if isinstance(earlier, list) else []
    write_json(folder / "environment.json", {**here, "earlier": [*earlier, before] if before else earlier})


# -- where and with what a run is made: versions, code, hardware, command ---------------------------------------------


def environment() -> dict[str, Any]:
    """Versions, code version, hardware and command: what a stranger needs to repeat the run."""
    from importlib import metadata

    import torch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    commit, dirty = code_version(Path(__file__).resolve().parents[1])
    packages = ("polarlm", "torch", "lightning", "hydra-core", "datasets", "tokenizers", "tiktoken", "numpy", "wandb")
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "git_commit": commit,
        "git_dirty": dirty,
        "platform": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def code_version(package: Path) -> tuple[str | None, bool | None]:
    """(commit, whether files of the package differ from it); None where no repository holds this package.

    Only the package counts: settings stand in the run's config.yaml, and a study writes its rows beside the code. An
    installed package may lie inside somebody's repository, whose commit says nothing about it.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    status = git("status", "--porcelain", "--", ".")
    return git("rev-parse", "HEAD"), bool(status) if status is not None else None
