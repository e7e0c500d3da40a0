"""Which settings make a run what it is, how two runs differ, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from polarlm.block_keys import flat_block, is_parted
from polarlm.errors import UserError

# Settings that may change between a killed run and its continuation without making it another experiment.
# (The names of choices are not what they choose: a run made by hand and the same run in a named sweep are one. What a
# recipe asks for stands in the groups that do it.)
IRRELEVANT = (
    "name", "group", "resume", "runs_dir", "cache_dir", "logger", "callbacks", "sample", "diagnostics", "choices",
    "recipe", "matched", "jobs", "micro_batch_found",
)  # fmt: skip
# What `match=` solves.
SOLVED = {"parameters": "model.ffn_width", "flops": "model.ffn_width", "seconds": "trainer.max_steps"}
# Settings of blocks that came later: the value at which a block is what it was without them, the settings that say
# nothing then, and the blocks shipped with another value (a stored configuration without the key has the neutral one).
ADDED = {"forgetting": ("none", ("forget_bias",), ("polarlm.attention.PolarAttention",))}
IRRELEVANT_TRAINER = (
    "accelerator", "devices", "nodes", "strategy", "log_every", "val_every",
    "checkpoint_every", "keep_checkpoints", "on_nonfinite", "max_incidents", "spike_z",
)  # fmt: skip


def experiment_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides the numbers."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    kept["trainer"] = {k: v for k, v in config["trainer"].items() if k not in IRRELEVANT_TRAINER}
    if config.get("micro_batch_found"):  # the card decided; what was asked is the experiment
        kept["trainer"]["micro_batch_tokens"] = "auto"
    if config.get("match") is None:  # as before there was such a setting
        kept = {key: value for key, value in kept.items() if key not in ("match", "match_block")}
    block = with_additions(config).get("block")
    if isinstance(block, dict):  # as before there were parts, and these settings
        flat = without_silent(flat_block(block))
        kept["block"] = {k: v for k, v in flat.items() if k not in ADDED or v != ADDED[k][0]}
    matched = config.get("matched")
    if matched:  # what `match=` solved follows from the rest: the experiment is what was asked
        group, _, name = matched["key"].partition(".")
        kept[group] = {**kept[group], name: matched["from"]}
    return kept


def with_additions(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the block's settings that came after it, as they were then, without silent ones."""
    block = config.get("block")
    if not isinstance(block, dict):
        return config
    later = {name: neutral for name, (neutral, _, blocks) in ADDED.items() if block.get("_target_") in blocks}
    return {**config, "block": block if is_parted(block) else without_silent(later | block)}


def without_silent(block: dict[str, Any]) -> dict[str, Any]:
    """The flat settings of a block without those that say nothing at the value of another."""
    for name, (neutral, silent, _) in ADDED.items():
        if block.get(name) == neutral:
            block = {key: value for key, value in block.items() if key not in silent}
    return block


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


def identity_of(config: dict[str, Any]) -> str:
    """A digest of everything that decides the numbers: two runs with the same one would end with the same weights."""
    return hashlib.sha256(json.dumps(experiment_of(config), sort_keys=True).encode()).hexdigest()


def default_name(config: dict[str, Any], swept: str = "") -> str:
    """block-model-data-seed, with what a sweep varies before the seed, and a hash of what decides the numbers."""
    choices = config["choices"]
    parts = [choices["block"], choices["model"], choices["data"], *([swept] if swept else []), f"seed{config['seed']}"]
    return "-".join([*parts, identity_of(config)[:6]])


SECRET = re.compile(r"(api_?key|password|passwd|secret|access_?token|auth_?token)$", re.IGNORECASE)


def refuse_secrets(config: dict[str, Any]) -> None:
    """Refuse settings that look like passwords: a run folder is made to be shown to others."""
    for key, value in flatten(config):
        if value is not None and SECRET.search(key.rpartition(".")[2]):
            raise UserError(
                f"{key} looks like a secret and would be stored in the run folder; set it in the environment instead "
                "(WANDB_API_KEY, HF_TOKEN)"
            )
