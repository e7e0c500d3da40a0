"""Which folder a configuration goes to: a new one, or an unfinished one of the same settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.files import json_object, read_config, read_json
from polarlm.runs.identity import default_name, differences, experiment_of, identity_of
from polarlm.runs.sweeps import run_folders


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
