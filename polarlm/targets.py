"""Classes and functions that a configuration may name.

A section like {_target_: polarlm.attention.PolarAttention, nu_t: 4} is built only when a yaml of its group names that
target, and only with plain values: a configuration that came with a stranger's run folder can't make us call anything
else. Nothing is interpolated here. A class of your own is named by a yaml of your own, in ./configs/<group>/.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from polarlm.errors import UserError
from polarlm.locations import config_folders


def named_targets(group: str) -> dict[str, Path]:
    """Every target that a yaml of the group names, with the first yaml that does."""
    named: dict[str, Path] = {}
    for folder in config_folders():
        for path in sorted((folder / group).glob("*.yaml")):
            section = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(section, dict) and isinstance(section.get("_target_"), str):
                named.setdefault(section["_target_"], path)
    return named


def target_of(section: Any, group: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(what the section names, its options), or a UserError when it names or passes anything that is not allowed."""
    if not isinstance(section, dict) or not isinstance(section.get("_target_"), str):
        raise UserError(f"{group} must be a group of settings with a _target_; found {_short(section)}")
    target = section["_target_"]
    allowed = named_targets(group)
    if target not in allowed:
        raise UserError(
            f"{group}._target_={_short(target)} is not a class that a yaml in configs/{group}/ names "
            f"({', '.join(sorted(allowed))}); write one for it if you trust it"
        )
    options = {key: value for key, value in section.items() if key not in ("_target_", "_partial_")}
    for key, value in options.items():
        if not isinstance(key, str) or key.startswith("_") or not _is_plain(value):
            raise UserError(f"{group}.{_short(key)}={_short(value)} must be a plain value: a number, a word or a list")
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name), options


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) and not isinstance(item, (list, tuple, dict)) for item in value)
    if isinstance(value, dict):
        return all(
            isinstance(k, str) and not k.startswith("_") and not isinstance(v, dict) and _is_plain(v)
            for k, v in value.items()
        )
    return value is None or isinstance(value, (bool, int, float, str))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
