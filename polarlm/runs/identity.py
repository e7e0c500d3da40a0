"""The settings that identify a run, its name, and finding runs and sweeps by them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polarlm.block_keys import flat_block, is_parted
from polarlm.errors import UserError
from polarlm.runs.files import json_object, read_config, read_json, require_plain_files, write_json
from polarlm.targets import MOVED, renamed

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
    kept = renamed(kept, {now: before for before, now in MOVED.items()})
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


# -- sweeps: their name, their plan on disk, and which of their jobs are done -----------------------------------------


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


NAMED_ANYWAY = ("block", "model", "data", "seed")  # in the name of every run
NO_SETTINGS = ("name", "group", "resume", "runs_dir", "cache_dir", "logger", "jobs", "hydra")


def swept_values(overrides: Sequence[str], swept: set[str]) -> str:
    """What a sweep varies, for the name of a run's folder: 'nu4-lr1e-3' of block.nu=4 optim.lr=1e-3."""
    parts = []
    for text in overrides:
        key, value = key_of(text), text.partition("=")[2]
        if key not in swept or key in NAMED_ANYWAY or key.partition(".")[0].partition("/")[0] in NO_SETTINGS:
            continue
        value = re.sub(r"[^\w.+-]", "", value)[:24]
        parts.append(key.rpartition(".")[2].rpartition("/")[2] + ("-" * value[:1].isalpha()) + value)
    return "-".join(parts)[:80].rstrip("-.")


def key_of(override: str) -> str:
    """The key an override sets."""
    return override.lstrip("+~").partition("=")[0]


_identities: dict[Path, tuple[int, str | None]] = {}  # config.yaml → its time stamp, the identity it describes


def run_folders(runs_dir: Path | str, names: str = "*") -> list[tuple[Path, str]]:
    """(folder, identity) of every readable run, or of those with such names; a configuration is read once."""
    folders = []
    for file in sorted(Path(runs_dir).glob(f"{names}/config.yaml")):
        try:
            stamp = file.stat().st_mtime_ns
            if _identities.get(file, (None,))[0] != stamp:
                _identities[file] = stamp, _identity_in(file)
        except OSError:
            continue  # removed meanwhile
        if (identity := _identities[file][1]) is not None:
            folders.append((file.parent, identity))
    return folders


def _identity_in(file: Path) -> str | None:
    try:
        require_plain_files(file.parent)
        return identity_of(read_config(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a damaged or foreign folder is not a run to count on


def known_runs(runs_dir: Path | str) -> dict[str, tuple[Path, dict[str, Any]]]:
    """identity → (folder, summary) of every readable run; a finished one wins over others of the same identity."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}
    for folder, identity in run_folders(runs_dir):
        try:
            summary = read_json(folder / "summary.json") or {}
        except ValueError:
            continue
        if identity not in known or summary.get("status") == "finished":
            known[identity] = folder, summary
    return known


def folder_of_run(runs_dir: Path | str, identity: str) -> Path | None:
    """The folder of the run with this identity, whatever its name or group; a finished one if there is one."""
    begun = None
    for folder, other in run_folders(runs_dir):
        if other == identity:
            if json_object(folder / "summary.json").get("status") == "finished":
                return folder
            begun = begun or folder
    return begun


def find_finished(config: dict[str, Any]) -> Path | None:
    """The finished run with the same numbers as this configuration would give, whatever its name or group."""
    folder = folder_of_run(config["runs_dir"], identity_of(config))
    return folder if folder and json_object(folder / "summary.json").get("status") == "finished" else None


def write_plan(runs_dir: Path | str, group: str, varied: Sequence[str], jobs: Sequence[dict[str, Any]]) -> Path:
    """Keep what a sweep is going to do, for `polarlm sweep status`; returns the sweep's folder."""
    folder = Path(runs_dir) / ".sweeps" / group
    write_json(folder / PLAN, {"group": group, "varied": list(varied), "jobs": list(jobs)})
    return folder


def read_plan(runs_dir: Path | str, group: str) -> dict[str, Any] | None:
    """The plan that the sweep of this name was last started with."""
    return read_json(Path(runs_dir) / ".sweeps" / group / PLAN)
