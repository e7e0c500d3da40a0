"""How long a training step takes here: a few steps on made-up tokens, the configurations in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from polarlm.model.build import build_model
from polarlm.training.batching import plan_run
from polarlm.training.hardware import choose_accelerator, choose_compile, choose_precision, compiled_loss
from polarlm.training.optimisers import build_optimiser, clip, gradients_of, total_norm

WARM_UP, FEWEST, SECONDS = 2, 8, 10.0
PATIENCE = 8  # times the seconds asked for: on a crowded machine fewer steps must do


def seconds_per_step(configs: Sequence[dict[str, Any]], vocabulary: int, seconds: float = SECONDS) -> list[float]:
    """Median seconds of an optimiser step of each configuration; taken in turn, so that a slow moment hits them all."""
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
