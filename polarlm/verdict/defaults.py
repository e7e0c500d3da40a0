"""The value that a setting has when nobody sets it: the yaml files that polarlm ships are where it stands."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from polarlm.locations import CONFIGS


def shipped_default(key: str, choices: dict[str, Any]) -> Any:
    """The default of a dotted key such as `block.nu_t` under the choices of a run (block=polar), or None if unknown."""
    group, _, name = key.partition(".")
    choice = choices.get(group)
    return shipped_settings(group, str(choice)).get(name) if choice and name else None


@cache
def shipped_settings(group: str, choice: str) -> dict[str, Any]:
    """The settings of configs/<group>/<choice>.yaml on top of those of the files that it starts from."""
    path = CONFIGS / group / f"{choice}.yaml"
    if Path(choice).name != choice or not os.path.isfile(path):
        return {}  # a choice of the user's own, or of another version
    settings: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True) or {}  # without recipe
    merged: dict[str, Any] = {}
    for base in settings.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            merged |= shipped_settings(group, base)
    return merged | {str(k): v for k, v in settings.items()}
