"""The run folder: one place that tells everything about a run, written so that a kill leaves nothing half-done."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from polarlm.data.atomic import write_beside
from polarlm.errors import UserError

# Settings that may change between a killed run and its continuation without making it another experiment.
IRRELEVANT = ("name", "group", "resume", "runs_dir", "cache_dir", "logger", "sample", "diagnostics")
IRRELEVANT_TRAINER = ("accelerator", "devices", "nodes", "strategy", "log_every", "checkpoint_every")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, making its folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or None when it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def experiment_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides the numbers."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    kept["trainer"] = {k: v for k, v in config["trainer"].items() if k not in IRRELEVANT_TRAINER}
    return kept


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}{key}.")
    else:
        yield prefix[:-1], tree


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """'key: old → new' for every leaf that differs."""
    a, b = dict(flatten(old)), dict(flatten(new))
    return [f"{key}: {a.get(key)} → {b.get(key)}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def default_name(config: dict[str, Any]) -> str:
    """block-model-data-seed plus a hash of everything that decides the numbers."""
    choices = config["choices"]
    digest = hashlib.sha256(json.dumps(experiment_of(config), sort_keys=True).encode()).hexdigest()[:6]
    return f"{choices['block']}-{choices['model']}-{choices['data']}-seed{config['seed']}-{digest}"


def choose_folder(config: dict[str, Any]) -> tuple[Path, bool, str | None]:
    """(folder, continue?, a sentence for the user) for a configuration.

    A finished run is never overwritten: the next one goes to `<name>-2`, `-3`, …
    An unfinished one is continued when `resume=auto` and its settings are the same.
    """
    if config["resume"] not in ("auto", "never"):
        raise UserError(f"resume={config['resume']!r} is unknown; choose auto or never")
    name = config["name"] or default_name(config)
    if not re.fullmatch(r"[\w.+=@-][\w.+=@ -]*", str(name)):
        raise UserError(f"name={name!r} must be one folder name: letters, digits, and any of . _ - + = @")
    taken: Path | None = None
    for number in range(1, 10_000):
        folder = Path(config["runs_dir"]) / (str(name) if number == 1 else f"{name}-{number}")
        if not (folder / "config.yaml").exists():
            if folder.exists() and any(folder.iterdir()):
                raise UserError(f"{folder} exists but is not a run folder (no config.yaml); choose another name=…")
            note = f"{taken} exists: this run goes to {folder}" if taken else None
            return folder, False, note
        finished = (read_json(folder / "summary.json") or {}).get("status") == "finished"
        if not finished and config["resume"] == "auto":
            old = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            changed = differences(experiment_of(old), experiment_of(config))
            if not changed:
                return folder, True, None
            raise UserError(
                f"{folder} holds an unfinished run with other settings ({'; '.join(changed[:5])}). "
                "Use its settings to continue it, another name=… for a new run, or resume=never to start beside it"
            )
        taken = folder
    raise UserError(f"No free folder for name={name!r} in {config['runs_dir']}")


def environment() -> dict[str, Any]:
    """Versions, code version, hardware and command: what a stranger needs to repeat the run."""
    from importlib import metadata

    import torch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def git(*arguments: str) -> str | None:
        here = Path(__file__).resolve().parent
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    packages = ("polarlm", "torch", "lightning", "hydra-core", "datasets", "tokenizers", "tiktoken", "numpy", "wandb")
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(status) if status is not None else None,
        "platform": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
