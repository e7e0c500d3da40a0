"""Runs that belong together: a sweep's name, its plan on disk, and which of its jobs are already done."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlm.runs.files import read_config, read_json, require_plain_files, write_json
from polarlm.runs.identity import identity_of

SWEPT_VARIABLE = "POLARLM_SWEPT"  # how a launcher tells a job in a process of its own which keys the sweep varies
RESULT_VARIABLE = "POLARLM_RESULT"  # a file that such a job leaves the name of its finished run's folder in
PLAN = "plan.json"


def command_overrides() -> tuple[list[str], set[str]]:
    """(this job's overrides, the keys a multirun varies); both empty outside Hydra."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    if not HydraConfig.initialized():
        return [], set()
    hydra = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    if SWEPT_VARIABLE in os.environ:
        return overrides, set(os.environ[SWEPT_VARIABLE].split())
    if hydra.mode != RunMode.MULTIRUN:
        return overrides, set()
    swept = set(hydra.sweeper.get("params") or {})
    typed = [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    for override in OverridesParser.create().parse_overrides(typed):
        if override.is_sweep_override():
            swept.add(override.key_or_group)
    return overrides, {key.lstrip("+~") for key in swept}


def sweep_group(config: dict[str, Any], overrides: Sequence[str], swept: set[str]) -> str | None:
    """One name for all jobs of a multirun: the named sweep's, else derived from what the jobs have in common."""
    if not swept:
        return None
    if config["choices"].get("sweep"):
        return str(config["choices"]["sweep"])
    common = sorted(tag for tag in overrides if key_of(tag) not in swept)
    digest = hashlib.sha256("\n".join([*common, *sorted(swept)]).encode()).hexdigest()[:6]
    return f"sweep-{'-'.join(sorted(key.rpartition('.')[2] for key in swept))}-{digest}"


def key_of(override: str) -> str:
    """The key an override sets."""
    return override.lstrip("+~").partition("=")[0]


def known_runs(runs_dir: Path | str) -> dict[str, tuple[Path, dict[str, Any]]]:
    """identity → (folder, summary) of every readable run; a finished one wins over others of the same identity."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in sorted(Path(runs_dir).glob("*/config.yaml")):
        try:
            require_plain_files(file.parent)
            config = read_config(file)
            summary = read_json(file.parent / "summary.json") or {}
            identity = identity_of(config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a damaged or foreign folder is not a run to count on
        if identity not in known or summary.get("status") == "finished":
            known[identity] = file.parent, summary
    return known


def find_finished(config: dict[str, Any]) -> Path | None:
    """The finished run with the same numbers as this configuration would give, whatever its name or group."""
    folder, summary = known_runs(config["runs_dir"]).get(identity_of(config), (None, {}))
    return folder if summary.get("status") == "finished" else None


def write_plan(runs_dir: Path | str, group: str, varied: Sequence[str], jobs: Sequence[dict[str, Any]]) -> Path:
    """Keep what a sweep is going to do, for `polarlm sweep status`; returns the sweep's folder."""
    folder = Path(runs_dir) / ".sweeps" / group
    write_json(folder / PLAN, {"group": group, "varied": list(varied), "jobs": list(jobs)})
    return folder


def read_plan(runs_dir: Path | str, group: str) -> dict[str, Any] | None:
    """The plan that the sweep of this name was last started with."""
    return read_json(Path(runs_dir) / ".sweeps" / group / PLAN)
