"""The sinks beside metrics.jsonl, chosen by the `logger` group.

loggers = build_loggers(config, folder)            # [] for logger=none and on ranks other than 0
try: … finally: finish_loggers(loggers, status)    # "finished", "failed" or "interrupted"
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from polarlm.errors import UserError
from polarlm.runs.files import read_json
from polarlm.runs.identity import flatten
from polarlm.runs.sweeps import command_overrides, key_of
from polarlm.visible import say_once

KINDS = ("wandb", "trackio", "none")
# Overrides that say where a run goes, not what it is.
PLACES = ("name", "group", "resume", "runs_dir", "cache_dir", "logger", "hydra")
MAX_TAG = 64  # wandb refuses longer tags


def build_loggers(config: dict[str, Any], folder: Path) -> list[Logger]:
    """The loggers of a resolved configuration, started; metrics.jsonl is not among them."""
    kind = config["logger"]["kind"]
    if kind not in KINDS:
        raise UserError(f"logger.kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind == "none" or getattr(rank_zero_only, "rank", 0):
        return []
    overrides, swept = command_overrides()
    tags = [tag[:MAX_TAG] for tag in overrides if key_of(tag) in swept or (not swept and not is_place(tag))]
    if kind == "wandb":
        from polarlm.training.loggers.wandb_sink import start_wandb

        varied = what_varies(config["choices"]["block"], overrides, swept)
        sink = start_wandb(config, folder, group=config["group"], tags=tags, varied=varied)
        return [] if sink is None else [sink]
    from polarlm.training.loggers.trackio_sink import TrackioSink

    return [TrackioSink(config, folder, group=config["group"])]


def what_varies(block: str, overrides: list[str], swept: set[str]) -> str:
    """What tells this job from the others of its sweep, seeds aside ('polar, optim.lr=0.003'); else its block."""
    others = [tag.lstrip("+") for tag in overrides if key_of(tag) in swept - {"seed", "block"} and not is_place(tag)]
    named = [block] if "block" in swept or not others else []
    return ", ".join(named + others)[:MAX_TAG]


def finish_loggers(loggers: list[Logger], status: str) -> None:
    """Close every sink with what summary.json says, also after a failure; a sink's own trouble is told in one line."""
    for logger in loggers:
        if not hasattr(logger, "finish"):
            continue
        folder = Path(logger.save_dir or ".")
        try:
            logger.finish(status, final_numbers(read_json(folder / "summary.json") or {}))
            if getattr(logger, "offline", False):
                say_once(f"wandb: logged offline; to upload: wandb sync {folder.parent}/*/wandb/offline-run-*")
        except Exception as error:
            print(f"{type(logger).__name__}: could not be closed ({error})", file=sys.stderr)


def final_numbers(summary: dict[str, Any]) -> dict[str, float | str]:
    """summary.json under flat slash names; what was judged at the end is `final/…`, since `val/…` are the curves."""
    numbers = {}
    for name, value in flatten(summary):
        name = name.replace(".", "/")
        if isinstance(value, (int, float, str)):
            numbers[f"final/{name}" if name.startswith(("val/", "test/")) else name] = value
    return numbers


def is_place(override: str) -> bool:
    """Whether an override only says where things are written."""
    return key_of(override).partition(".")[0] in PLACES
