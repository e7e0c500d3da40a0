"""How long jobs will take here, from a few measured steps of every kind of job; validation comes on top."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from polarlm.errors import UserError

MOST_KINDS = 12  # of more kinds of jobs one per block is measured, and the others follow by their FLOPs
FEWEST_STEPS = 400  # of all jobs together: less is over before it is measured
SECONDS = 1.0  # of measuring per kind
CHARACTERS, UNKNOWN = 100, 10_000  # vocabularies that only the text will tell


def seconds_of_jobs(configs: Sequence[dict[str, Any]], threads: int | None = None) -> list[float] | None:
    """Expected training seconds of every configuration; None where measuring is not worth it."""
    from polarlm.training.batching import plan_run

    steps = [plan_run(config)[1] for config in configs]
    if sum(steps) < FEWEST_STEPS or any(config["trainer"]["devices"] > 1 for config in configs):
        return None
    kinds = {kind_of(config): config for config in configs}
    measured = kinds
    if len(kinds) > MOST_KINDS:
        measured = {kind_of(c): c for c in {c["choices"]["block"]: c for c in kinds.values()}.values()}
    print("  measuring a few steps …", file=sys.stderr, flush=True)
    times = measure_kinds(measured, threads)
    speeds = {measured[kind]["choices"]["block"]: t / flops_of_step(measured[kind]) for kind, t in times.items()}
    for kind in kinds.keys() - times.keys():
        times[kind] = flops_of_step(kinds[kind]) * speeds[kinds[kind]["choices"]["block"]]
    return [count * times[kind_of(config)] for count, config in zip(steps, configs)]


def measure_kinds(kinds: dict[str, dict[str, Any]], threads: int | None) -> dict[str, float]:
    """Seconds of a step of every kind, with as many threads as a job will have."""
    import torch

    from polarlm.training.batching import seconds_per_step

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return {kind: seconds_per_step([c], likely_vocabulary(c), SECONDS)[0] for kind, c in kinds.items()}
    finally:
        torch.set_num_threads(before)


def flops_of_step(config: dict[str, Any]) -> float:
    """Counted FLOPs of an optimiser step."""
    from polarlm.model.build import build_model

    model = build_model(config, likely_vocabulary(config))
    return float(model.flops_per_token(config["model"]["context"]) * config["trainer"]["batch_tokens"])


def kind_of(config: dict[str, Any]) -> str:
    """Equal for jobs whose steps take equally long."""
    trainer = {k: config["trainer"][k] for k in ("batch_tokens", "micro_batch_tokens", "precision", "compile")}
    parts = [config["block"], config["model"], config["optim"]["_target_"], trainer, likely_vocabulary(config)]
    return json.dumps(parts, sort_keys=True)


def likely_vocabulary(config: dict[str, Any]) -> int:
    """The tokenizer's vocabulary where its settings tell it, else a usual one."""
    from polarlm.training.plan import vocabulary_of

    try:
        return vocabulary_of(config["tokenizer"])
    except UserError:
        return CHARACTERS if config["tokenizer"]["kind"] == "char" else UNKNOWN
