"""Classes and functions that a configuration may name.

A section like {_target_: polarlm.attention.PolarAttention, nu_t: 4} is built only when a yaml of its group names that
target, and only with plain values; nothing is interpolated here. Our own yamls count for every configuration. The
user's yamls in ./configs/<group>/ count only for what the user typed: a stored configuration may have come with them
in one download. They may name classes of the group's kind and never functions, which would let a yaml call anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from polarlm.errors import UserError
from polarlm.locations import CONFIGS, own_configs

# Names that stored configurations have for classes that have moved since; run identities are made of them.
MOVED = {
    "polarlm.training.optimisers.adamw.adamw": "polarlm.training.optimisers.adamw",
    "polarlm.training.optimisers.muon.muon": "polarlm.training.optimisers.muon",
    "polarlm.training.schedules.constant.Constant": "polarlm.training.schedules.Constant",
    "polarlm.training.schedules.cosine.Cosine": "polarlm.training.schedules.Cosine",
    "polarlm.training.schedules.linear.Linear": "polarlm.training.schedules.Linear",
    "polarlm.training.schedules.wsd.WarmupStableDecay": "polarlm.training.schedules.WarmupStableDecay",
}
# Packages that shipped loggers need and that come with an extra.
EXTRAS = {"TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow", "TrackioLogger": "trackio"}
TRUST_VARIABLE = "POLARLM_TRUST"  # modules of the user whose classes stored runs may build: my_blocks,other.module


def named_targets(folder: Path, group: str) -> set[str]:
    """Every target that a yaml of the group names: at its top, or in its sections where several may be chosen."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (folder / group).glob("*.yaml")]
    sections = [section for file in files if isinstance(file, dict) for section in (file, *file.values())]
    targets = [section.get("_target_") for section in sections if isinstance(section, dict)]
    return {target for target in targets if isinstance(target, str)}


def target_of(section: Any, group: str, kind: type, *, stored: bool = False) -> tuple[Any, dict[str, Any]]:
    """(what the section names, its options), or a UserError when it names or passes anything that is not allowed.

    `kind` is the base class of the group's classes; `stored` says that a run folder holds the section.
    """
    if not isinstance(section, dict) or not isinstance(section.get("_target_"), str):
        raise UserError(f"{group} must be a group of settings with a _target_; found {_short(section)}")
    written: str = section["_target_"]
    target = MOVED.get(written, written)
    module, _, name = target.rpartition(".")
    ours = named_targets(CONFIGS, group)
    own = None if stored else own_configs()
    trusted = module in os.environ.get(TRUST_VARIABLE, "").split(",")
    if target not in ours and not trusted and (own is None or written not in named_targets(own, group)):
        if stored:
            raise UserError(
                f"{group}._target_={_short(target)} is not a class of polarlm, so a stored run can't use it; if it is "
                f"your own, set {TRUST_VARIABLE} in the environment to its module ({_short(module)})"
            )
        raise UserError(
            f"{group}._target_={_short(target)} is not a class that a yaml in configs/{group}/ names "
            f"({', '.join(sorted(ours))}); write one for it if you trust it"
        )
    options = {key: value for key, value in section.items() if key not in ("_target_", "_partial_")}
    for key, value in options.items():
        if not isinstance(key, str) or key.startswith("_") or not _is_plain(value):
            raise UserError(f"{group}.{_short(key)}={_short(value)} must be a plain value: a number, a word or a list")
    try:
        target_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{group}._target_={_short(target)} can't be imported: {error}") from error
    if target not in ours and not (isinstance(target_class, type) and issubclass(target_class, kind)):
        raise UserError(f"{group}._target_={_short(target)} is not a subclass of {kind.__module__}.{kind.__qualname__}")
    return target_class, options


def renamed(config: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A configuration whose optimiser and schedule have other names of the same classes."""
    sections = {group: config[group] for group in ("optim", "schedule") if isinstance(config.get(group), dict)}
    return config | {
        group: {**section, "_target_": names.get(str(section.get("_target_")), section.get("_target_"))}
        for group, section in sections.items()
    }


def require_packages(config: dict[str, Any]) -> None:
    """Refuse a logger whose package is not installed."""
    for group in ("logger", "callbacks"):
        for name, section in (config.get(group) or {}).items():
            needed = EXTRAS.get(str(section.get("_target_")).rpartition(".")[2])
            if needed and importlib.util.find_spec(needed) is None:
                raise UserError(
                    f"{group}={name} needs the {needed} package, which is not installed: "
                    f"pip install 'polarlm[{needed}]', or choose logger=wandb, logger=csv or logger=none"
                )


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
