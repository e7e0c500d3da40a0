"""Loggers and callbacks that a configuration names, built so that their failure cannot stop a run.

A yaml holds one section with a `_target_`; its other keys are passed on. {folder}, {name}, {group}, {tags}, {varied}
and {config} in their values stand for the run's own. metrics.jsonl (json_lines.py) is the record of a run: every other
logger gets a copy of its rows, and a logger that fails is dropped with one warning.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from polarlm.errors import UserError
from polarlm.runs.files import json_lines, read_json
from polarlm.runs.identity import command_overrides, flatten, key_of
from polarlm.targets import require_packages, target_of

KINDS = {"logger": Logger, "callbacks": Callback}
# Overrides that say where a run goes, not what it is.
PLACES = ("name", "group", "resume", "runs_dir", "cache_dir", "logger", "callbacks", "hydra")
MAX_TAG = 64  # wandb refuses longer tags
# What Lightning, the recorder and the probe call; anything else is the user's own code calling the logger.
GUARDED = (
    "log_metrics", "log_hyperparams", "log_graph", "log_probe", "log_samples", "save", "finalize", "finish", "replay",
    "after_save_checkpoint",
)  # fmt: skip


def check_targets(config: dict[str, Any]) -> None:
    """Refuse loggers and callbacks that can't be built here, before a run folder is made."""
    require_packages(config)
    for group in ("logger", "callbacks"):
        for section in (config.get(group) or {}).values():
            build, options = _target(section, group)
            if hasattr(build, "check"):
                build.check(options)


def build_callbacks(config: dict[str, Any], folder: Path) -> list[Any]:
    """The callbacks that `callbacks=` names, on every rank."""
    return [_build(section, "callbacks", name, config, folder) for name, section in (config["callbacks"] or {}).items()]


def build_loggers(config: dict[str, Any], folder: Path) -> list[Any]:
    """The loggers that `logger=` names, started, on rank 0; metrics.jsonl is not among them."""
    if getattr(rank_zero_only, "rank", 0):
        return []
    loggers = []
    for name, section in (config["logger"] or {}).items():
        try:
            logger = _build(section, "logger", name, config, folder)
        except UserError:
            raise
        except Exception as error:
            _warn(name, "could not be started", error)
            continue
        if logger is None:  # switched off outside (WANDB_MODE=disabled)
            continue
        guard(logger, name)
        if (place := rewritten(logger, folder)) is not None:
            shutil.rmtree(place, ignore_errors=True)  # metrics.jsonl has it all: replay
        logger.log_hyperparams(config)
        loggers.append(logger)
    return loggers


def guard(logger: Any, name: str) -> None:
    """Let the first error of a logger be its last: one warning, then it is left alone and training goes on."""
    failed: list[Exception] = []

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if failed:
                return None
            try:
                return method(*args, **kwargs)
            except Exception as error:
                failed.append(error)
                _warn(name, "failed and is left out from here on", error)
                return None

        return call

    for method in GUARDED:
        if callable(getattr(logger, method, None)):
            setattr(logger, method, guarded(getattr(logger, method)))


def rewritten(logger: Any, folder: Path) -> Path | None:
    """Where a logger keeps files inside the run folder that a resumed run writes again from metrics.jsonl."""
    place = getattr(logger, "log_dir", None)
    if not place or hasattr(logger, "replay"):
        return None
    path = Path(place).resolve()
    return path if folder.resolve() in path.parents else None


def replay(loggers: list[Any], folder: Path) -> None:
    """Give loggers the rows of metrics.jsonl that a resumed run begins with, so that each has one gapless curve."""
    rows = json_lines(folder / "metrics.jsonl")
    for logger in loggers:
        if hasattr(logger, "replay"):
            logger.replay()
        elif rewritten(logger, folder) is not None:
            for row in rows:
                logger.log_metrics(numbers_of(row), step=row["step"])


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def own_step(metrics: dict[str, Any], step: int | None) -> int | None:
    """The step of a row: what Lightning logs itself (`self.log` of a callback) has its epoch and counts from 0."""
    return step + 1 if step is not None and "epoch" in metrics else step


def finish_loggers(loggers: list[Any], folder: Path, status: str) -> None:
    """Close loggers that have a `finish` with what summary.json says, also after a failure."""
    for logger in loggers:
        if hasattr(logger, "finish"):
            logger.finish(status, final_numbers(read_json(folder / "summary.json") or {}))


def final_numbers(summary: dict[str, Any]) -> dict[str, float | str]:
    """summary.json under flat slash names; what was judged at the end is `final/…`, since `val/…` are the curves."""
    numbers = {}
    for name, value in flatten(summary):
        name = name.replace(".", "/")
        if isinstance(value, (int, float, str)):
            numbers[f"final/{name}" if name.startswith(("val/", "test/")) else name] = value
    return numbers


def placeholders(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What stands for {folder}, {name}, … in the yaml of a logger or callback."""
    overrides, swept = command_overrides()
    tags = [tag[:MAX_TAG] for tag in overrides if key_of(tag) in swept or (not swept and not is_place(tag))]
    varied = what_varies(config["choices"]["block"], overrides, swept)
    group = config["group"]
    return {
        "folder": str(folder),
        "name": folder.name,
        "group": group,
        "tags": tags,
        "varied": varied,
        "config": config,
    }


def what_varies(block: str, overrides: list[str], swept: set[str]) -> str:
    """What tells this job from the others of its sweep, seeds aside ('polar, optim.lr=0.003'); else its block."""
    others = [tag.lstrip("+") for tag in overrides if key_of(tag) in swept - {"seed", "block"} and not is_place(tag)]
    named = [block] if "block" in swept or not others else []
    return ", ".join(named + others)[:MAX_TAG]


def is_place(override: str) -> bool:
    """Whether an override only says where things are written."""
    return key_of(override).partition(".")[0] in PLACES


def _target(section: Any, group: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a class of the user's own, in a file beside ./configs
    return target_of(section, group, KINDS[group])


def _build(section: Any, group: str, name: str, config: dict[str, Any], folder: Path) -> Any:
    build, options = _target(section, group)
    known = placeholders(config, folder)

    def filled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.startswith("{") and value.endswith("}") and value[1:-1] in known:
            return known[value[1:-1]]
        for word in ("folder", "name", "group", "varied"):
            value = value.replace(f"{{{word}}}", str(known[word] or ""))
        return value

    try:
        return build(**{key: filled(value) for key, value in options.items()})
    except TypeError as error:
        raise UserError(f"{group}.{name} can't be built: {error}") from error


def _warn(name: str, what: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:300]
    print(
        f"warning: logger {name} {what} ({type(error).__name__}: {reason}); metrics.jsonl is still written",
        file=sys.stderr, flush=True,
    )  # fmt: skip
