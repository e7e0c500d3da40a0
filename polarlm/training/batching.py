"""Batch size in tokens, independent of the micro-batch and the number of devices."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.files import read_config
from polarlm.runs.folder import choose_folder
from polarlm.training.ranks import is_first, shared_folder


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step is cut: micro × accumulate × processes sequences of `context` tokens."""

    context: int
    micro: int
    accumulate: int
    processes: int

    @property
    def tokens(self) -> int:
        """Tokens per optimiser step."""
        return self.context * self.micro * self.accumulate * self.processes


AUTO_TOKENS = 16384  # what micro_batch_tokens=auto means where no card decides it: with_micro_batch


def plan_batches(batch_tokens: int, context: int, processes: int, micro_batch_tokens: int | str) -> BatchPlan:
    """Cut `batch_tokens` into the fewest micro-batches that fit `micro_batch_tokens` on each process."""
    limit = AUTO_TOKENS if micro_batch_tokens == "auto" else int(micro_batch_tokens)
    if batch_tokens % (context * processes):
        step = context * processes
        nearest = max(1, round(batch_tokens / step)) * step
        raise UserError(
            f"trainer.batch_tokens={batch_tokens} is not a multiple of context × processes = {context} × {processes}; "
            f"the nearest that is: {nearest}"
        )
    sequences = batch_tokens // context // processes
    small = [m for m in range(1, math.isqrt(sequences) + 1) if sequences % m == 0]
    divisors = [*small, *(sequences // m for m in small)]
    micro = max(m for m in divisors if m * context <= max(limit, context))
    return BatchPlan(context, micro, sequences // micro, processes)


def plan_run(config: dict[str, Any]) -> tuple[BatchPlan, int]:
    """The batch plan of a configured run and its number of steps."""
    t = config["trainer"]
    processes = t["devices"] * t["nodes"]
    plan = plan_batches(t["batch_tokens"], config["model"]["context"], processes, t["micro_batch_tokens"])
    return plan, total_steps(t["max_steps"], t["max_tokens"], plan.tokens)


def total_steps(max_steps: int | None, max_tokens: float | None, batch_tokens: int) -> int:
    """The number of optimiser steps that trainer.max_tokens (which wins) or trainer.max_steps ask for."""
    steps = -(-int(max_tokens) // batch_tokens) if max_tokens is not None else max_steps
    if steps is None or steps < 1:
        raise UserError(
            f"The run would have {steps} steps; set trainer.max_steps (or trainer.max_tokens) to at least 1"
        )
    return int(steps)


# -- trainer.micro_batch_tokens=auto: as many tokens at once as fit the GPU --------------------------------------------


USABLE = 0.9  # of the memory: driver, communication and fragmentation take the rest


def with_micro_batch(config: dict[str, Any], vocabulary: int, accelerator: str, precision: str) -> dict[str, Any]:
    """The configuration with a number where micro_batch_tokens=auto stood, and a note that it was found.

    The memory of a step is counted on fake tensors (memory.py), which says where to begin; one real step then
    proves it, and where the GPU refuses, half is tried. The number is stored in the run's config.yaml: a resumed run,
    and the other processes, take it from there, so that gradients are added up in the same order.
    """
    stored = _stored(config)
    if stored is not None:
        tokens = int(stored["trainer"]["micro_batch_tokens"])
    elif accelerator != "cuda":
        tokens = AUTO_TOKENS
    else:
        import torch

        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        processes = config["trainer"]["devices"] * config["trainer"]["nodes"]
        candidates = fitting_tokens(config, vocabulary, precision, processes, memory)
        tokens = first_that_runs(candidates, lambda tokens: _try_step(config, vocabulary, tokens))
        print(f"trainer.micro_batch_tokens=auto: {tokens:,} fit this GPU", file=sys.stderr, flush=True)
    trainer = {**config["trainer"], "micro_batch_tokens": tokens}
    return {**config, "trainer": trainer, "micro_batch_found": True}


def _stored(config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the run that this process continues or belongs to."""
    if not is_first():
        return read_config(shared_folder() / "config.yaml")
    folder, again, _ = choose_folder(config)
    return read_config(folder / "config.yaml") if again else None


def fitting_tokens(
    config: dict[str, Any], vocabulary: int, precision: str, processes: int, memory: float
) -> Iterator[int]:
    """Micro-batches in tokens that should fit `memory` bytes, the largest first, each at most half of the one before.

    Memory is counted for one and two windows: what each further window adds is their difference.
    """
    from polarlm.training.memory import device_memory
    from polarlm.training.plan import count_step, shape_of, untouched_model, weight_bytes

    trainer, model = config["trainer"], config["model"]
    context, strategy = model["context"], "fsdp" if trainer["strategy"] == "fsdp" else "ddp"
    shape = shape_of(untouched_model(config, vocabulary), weight_bytes(precision), processes)

    def peak(windows: int) -> int:
        batch = BatchPlan(context, windows, 2, processes)
        step = count_step(config, vocabulary, batch, precision, recompute=model["checkpointing"])
        return device_memory(step, shape, strategy, processes).peak

    one, two = peak(1), peak(2)
    per_window = max(1, two - one)
    windows = int((USABLE * memory - one) / per_window) + 1
    if windows < 1:
        raise UserError(
            f"One window of {context:,} tokens needs about {one / 1e9:.1f} GB and this GPU has {memory / 1e9:.1f}; "
            "set model.checkpointing=true, or choose a smaller model or model.context"
        )
    while windows >= 1:
        tokens = plan_batches(trainer["batch_tokens"], context, processes, windows * context).micro * context
        yield tokens
        windows = tokens // context // 2


def first_that_runs(candidates: Iterator[int], try_step: Callable[[int], bool]) -> int:
    """The first candidate with which a step runs; says what to do when none does."""
    tried = []
    for tokens in candidates:
        if try_step(tokens):
            return tokens
        tried.append(tokens)
    raise UserError(
        f"No micro-batch fits this GPU (out of memory with {', '.join(f'{t:,}' for t in tried)} tokens); set "
        "model.checkpointing=true, or choose a smaller model or model.context"
    )


def _try_step(config: dict[str, Any], vocabulary: int, tokens: int) -> bool:
    """Whether a step of two micro-batches of so many tokens runs; not compiled, which takes no less memory."""
    import gc

    import torch

    alone = {"micro_batch_tokens": tokens, "batch_tokens": 2 * tokens, "devices": 1, "nodes": 1, "compile": False}
    try:
        one_step({**config, "trainer": {**config["trainer"], **alone}}, vocabulary)()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()


# -- how long a training step takes here: a few steps on made-up tokens, the configurations in turn --------------------


WARM_UP, FEWEST, STEP_SECONDS = 2, 8, 10.0
PATIENCE = 8  # times the seconds asked for: on a crowded machine fewer steps must do


def seconds_per_step(configs: Sequence[dict[str, Any]], vocabulary: int, seconds: float = STEP_SECONDS) -> list[float]:
    """Median seconds of an optimiser step of each configuration, measured in turns so that noise affects all."""
    steps = [one_step(config, vocabulary) for config in configs]
    taken: list[list[float]] = [[] for _ in steps]
    started, rounds = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds or rounds < WARM_UP + FEWEST:
        if spent > PATIENCE * seconds and rounds > WARM_UP:
            break
        for step, times in zip(steps, taken):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        rounds += 1
    return [median(times[WARM_UP:]) for times in taken]


def one_step(config: dict[str, Any], vocabulary: int) -> Callable[[], None]:
    """A whole optimiser step: every micro-batch forward and backward, clipping, update."""
    import torch

    from polarlm.model.build import build_model
    from polarlm.training.hardware import choose_accelerator, choose_compile, choose_precision, compiled_loss
    from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm

    trainer = config["trainer"]
    accelerator = choose_accelerator(trainer["accelerator"])
    device = torch.device({"gpu": "cuda"}.get(accelerator, accelerator))
    precision = choose_precision(trainer["precision"], accelerator).value
    plan, steps = plan_run(config)
    model = build_model(config, vocabulary).to(device)
    optimiser = build_optimiser(config["optim"], model)
    flops = model.flops_per_token(plan.context) * plan.tokens / plan.processes
    compiled = choose_compile(trainer["compile"], accelerator, config["choices"]["block"], flops, steps).value == "yes"
    loss = compiled_loss(model) if compiled else model.loss
    tokens = torch.randint(vocabulary, (plan.micro, plan.context), device=device)
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)

    def step() -> None:
        for _ in range(plan.accumulate):
            with torch.autocast(device.type, dtype=half, enabled=half is not None):
                value = loss(tokens, tokens)
            value.backward()
        gradients = gradients_of(model.parameters())
        if config["optim"]["grad_clip"]:
            clip(gradients, total_norm(gradients), float(config["optim"]["grad_clip"]))
        optimiser.step()
        optimiser.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return step
