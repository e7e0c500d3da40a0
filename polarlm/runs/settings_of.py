"""The settings that train.py would take by itself, and those of a run's own choices."""

from __future__ import annotations

import os
import re
from typing import Any

from polarlm.locations import CONFIGS


def default_settings(choices: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings without any choice, settings with these choices), both with the names chosen in every group.

    A name that is no file (a size changed by hand is called 2x32) leaves that group at its default.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    def plain(overrides: list[str]) -> dict[str, Any]:
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
        picked = {k: v for k, v in cfg.hydra.runtime.choices.items() if "hydra" not in k and v is not None}
        ours = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        return {**OmegaConf.to_container(ours, resolve=True), "choices": picked}  # type: ignore[dict-item]

    world = GlobalHydra.instance()
    running, world.hydra = world.hydra, None
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            default = plain([])
            known = [
                f"{group}={name}"
                for group, name in choices.items()
                if group in default["choices"] and is_choice(group, name)
            ]
            return default, plain(known)
    finally:
        world.hydra = running


def is_choice(group: str, name: Any) -> bool:
    """Whether a yaml of ours has this name; a stored name must not lead to another folder's."""
    # os.path.isfile is False for a name that is too long; Path.exists raises.
    return re.fullmatch(r"[\w-]+", str(name)) is not None and os.path.isfile(CONFIGS / group / f"{name}.yaml")
