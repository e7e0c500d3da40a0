"""`match=parameters|flops|seconds`: the block's budget made equal to the reference block's before it is trained.

Parameters and FLOPs are matched by the feed-forward width, seconds by the number of steps. The configuration of the run
holds what was solved (`model.ffn_width`, `trainer.max_steps`), and under `matched` what it was before and how far off
it is; the identity of a run is that of its question, so a killed run or a sweep goes on as any other.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from polarlm.errors import UserError
from polarlm.runs.files import read_json
from polarlm.runs.identity import SOLVED, experiment_of

MATCHED_TO = 0.005  # how close it must come (relative)
WIDTHS = (64, 32, 16, 8, 4, 2, 1)  # the coarsest step that comes near enough: matrix units like round numbers


def apply_match(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its budget matched, and a line that says what was changed."""
    what, reference = config.get("match"), config.get("match_block")
    if what is None:
        return config
    if what != "seconds" and config["model"].get("ffn_width") is not None:
        raise UserError(f"match={what} solves model.ffn_width, which was given too; leave one of them out.")
    if what == "seconds" and config["trainer"]["max_tokens"] is not None:
        raise UserError("match=seconds solves trainer.max_steps; give the reference's length as trainer.max_steps.")
    other = {**config, "block": reference_block(config), "choices": {**config["choices"], "block": reference}}
    if config["block"] == other["block"]:
        print(f"match={what}: {reference} is the reference, nothing to change", file=sys.stderr)
        return config
    solved = _solve_steps(config, other) if what == "seconds" else _solve_width(what, config, other)
    key = SOLVED[what]
    group, _, name = key.partition(".")
    before = config[group][name]
    matched = {"key": key, "from": before, "to": solved.value, "cost": solved.cost, "gap": solved.gap}
    print(
        f"match={what}: {key} {before} → {solved.value}, {solved.cost:,.4g} {what}, "
        f"{100 * solved.gap:+.2f} % of {reference}'s",
        file=sys.stderr,
    )
    return {**config, group: {**config[group], name: solved.value}, "matched": matched}


def reference_block(config: dict[str, Any]) -> dict[str, Any]:
    """The reference block's settings as shipped, under this run's recipe."""
    from polarlm.launch.overrides import compose, config_loader

    shipped = copy.deepcopy(compose(config_loader(), "train", [f"block={config['match_block']}"]))
    OmegaConf.set_struct(shipped, False)
    shipped.recipe = config.get("recipe", {})
    return OmegaConf.to_container(shipped.block, resolve=True)  # type: ignore[return-value]


def _solve_width(what: str, config: dict[str, Any], reference: dict[str, Any]) -> Match:
    vocabulary = _vocabulary(config)
    target = _cost(what, reference, vocabulary)
    model = config["model"]
    first, second = (_cost(what, {**config, "model": {**model, "ffn_width": w}}, vocabulary) for w in (1, 2))

    def cost(width: int) -> float:
        return first + (width - 1) * (second - first)  # every matrix of a feed-forward has one side of this length

    kept = _hidden(model)
    if abs(cost(kept) / target - 1) <= MATCHED_TO:
        return Match(kept, cost(kept), cost(kept) / target - 1)
    for multiple in WIDTHS[:-1]:
        try:
            return match_width(cost, target, what=what, multiple=multiple)
        except UserError:
            continue
    return match_width(cost, target, what=what)


def _hidden(model: dict[str, Any]) -> int:
    from polarlm.model.feed_forward import hidden_size

    return hidden_size(model["ffn"], model["d_model"], model["ffn_mult"])


def _vocabulary(config: dict[str, Any]) -> int:
    from polarlm.data import build_corpus

    return build_corpus(config["data"], config["tokenizer"], config["cache_dir"]).tokenizer.vocab_size


def _cost(what: str, config: dict[str, Any], vocabulary: int) -> float:
    from polarlm.model.build import build_model

    model = build_model(config, vocabulary)
    return model.parameter_count() if what == "parameters" else model.flops_per_token()


def _solve_steps(config: dict[str, Any], reference: dict[str, Any]) -> Match:
    """As many steps as take the reference's seconds; measured once per question, so that all seeds get the same."""
    steps = config["trainer"]["max_steps"]
    measured = _once(_note(config), lambda: _measure(config, reference))
    return match_steps(measured["own"], steps * measured["reference"])


def _measure(config: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    from polarlm.training.batching import seconds_per_step

    ours, other = seconds_per_step([config, reference], _vocabulary(config))
    return {"own": ours, "reference": other}


def _note(config: dict[str, Any]) -> Path:
    """Where the measurement of this question is kept: the same for every seed and every length."""
    question = {k: v for k, v in experiment_of(config).items() if k not in ("seed", "init_from", "schedule", "optim")}
    question["trainer"] = {k: v for k, v in question["trainer"].items() if k != "max_steps"}
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]
    return Path(config["runs_dir"]) / ".match" / f"{config['choices']['block']}-{digest}.json"


def _once(path: Path, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What the file holds; measured and written when there is none. Of several processes the first one's counts."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(measure()), encoding="utf-8")
        try:
            os.link(beside, path)
        except FileExistsError:
            pass
        finally:
            beside.unlink()
    return read_json(path)


@dataclass(frozen=True)
class Match:
    """A setting that makes a budget equal to a reference: its value, what it costs, and how far that is off."""

    value: int
    cost: float
    gap: float


def match_width(
    cost: Callable[[int], float], target: float, *, what: str, multiple: int = 1, most: int = 1 << 20
) -> Match:
    """The multiple of `multiple` whose `cost(width)` (parameters or FLOPs, growing in width) is nearest to `target`.

    Raises a UserError when no width comes within 0.5 %: the block alone is too dear, or the steps are too coarse.
    """
    low, high = 1, 1
    if cost(multiple) > target * (1 + MATCHED_TO):
        raise UserError(
            f"match={what}: with a feed-forward width of only {multiple} this block has {cost(multiple):.4g} {what}, "
            f"the reference {target:.4g}; choose fewer layers, a smaller model.d_model, or another match="
        )
    while cost(high * multiple) < target and high * multiple < most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle * multiple) < target else (low, middle)
    best = min((low * multiple, high * multiple), key=lambda width: abs(cost(width) - target))
    match = Match(best, cost(best), cost(best) / target - 1)
    if abs(match.gap) > MATCHED_TO:
        raise UserError(
            f"match={what}: the nearest feed-forward width, {best}, gives {match.cost:.4g} {what} instead of "
            f"{target:.4g} ({_signed(match.gap)}, allowed are ±{100 * MATCHED_TO:g} %); "
            "widths in finer steps or a larger model would come closer"
        )
    return match


def match_steps(seconds_per_step: float, target_seconds: float) -> Match:
    """The number of steps that takes as long as the reference run."""
    steps = max(1, round(target_seconds / seconds_per_step))
    match = Match(steps, steps * seconds_per_step, steps * seconds_per_step / target_seconds - 1)
    if abs(match.gap) > MATCHED_TO:
        raise UserError(
            f"match=seconds: {steps} steps take {match.cost:.4g} s instead of {target_seconds:.4g} s "
            f"({_signed(match.gap)}); a reference run of more than {round(1 / MATCHED_TO / 2)} steps can be matched"
        )
    return match


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-", "−")
