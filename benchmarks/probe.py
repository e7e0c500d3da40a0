"""What looking inside costs: one probe against the training steps between two probes, in one process.

    python -m benchmarks.probe [--rounds 5] [--steps 4] [--compiled] [key=value …]

Steps and probes alternate, so that the share does not see the machine's mood. A probe is everything the callback does:
the recorded forward pass, the statistics, the line of probe.jsonl, the flat scalars and wandb's charts (offline).
With --compiled the same steps also run through `torch.compile` in every round; compiling happens before the clock runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.framework import composed
from polarlm.diagnostics import run_probe
from polarlm.locations import CONFIGS
from polarlm.training.callbacks import probe_batch
from polarlm.training.job import Job, build_job
from polarlm.training.loggers import build_loggers, finish_loggers
from polarlm.training.loop import quiet_libraries
from polarlm.training.optimisers import build_optimiser


def measure(overrides: list[str], rounds: int, steps: int, compiled: bool) -> dict[str, float | str]:
    """Seconds per step and per probe (medians over rounds) and the share of training time at the default interval."""
    config = composed(overrides, steps)
    diagnostics = OmegaConf.load(CONFIGS / "diagnostics" / "default.yaml")
    config["logger"] = OmegaConf.to_container(OmegaConf.load(CONFIGS / "logger" / "wandb.yaml"))
    os.environ["WANDB_MODE"] = "offline"
    job = build_job(config)
    batch = probe_batch(job.data, tokens=diagnostics.tokens, length=diagnostics.length)
    kinds = {"eager": job.model.loss} | ({"compiled": torch.compile(job.model.loss)} if compiled else {})
    parts = {kind: stepper(job, loss, steps) for kind, loss in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        loggers = build_loggers(config, Path(folder))
        parts["probe"] = prober(job, batch, loggers, Path(folder) / "probe.jsonl")
        times: dict[str, list[float]] = {kind: [] for kind in parts}
        for _ in range(rounds + 1):
            for kind, part in parts.items():
                began = time.perf_counter()
                next(part)
                times[kind].append(time.perf_counter() - began)
        finish_loggers(loggers, Path(folder), "finished")
    seconds = {kind: statistics.median(measured[1:]) for kind, measured in times.items()}  # the first round warms up
    row: dict[str, float | str] = {"run": f"{config['choices']['block']} {config['choices']['model']}"}
    row |= {"every": diagnostics.every, "tokens_per_step": job.plan.tokens, "probe_seconds": seconds["probe"]}
    for kind in kinds:
        step = seconds[kind] / steps
        share = seconds["probe"] / (diagnostics.every * step + seconds["probe"])
        row |= {f"{kind}_step_seconds": step, f"{kind}_share": share}
    return row


def stepper(job: Job, loss: Callable[..., torch.Tensor], steps: int) -> Iterator[None]:
    """Each `next` takes `steps` training steps."""
    optimiser, batches = build_optimiser(job.config["optim"], job.model), iter(job.data.train_dataloader())
    while True:
        for _ in range(steps):
            for _ in range(job.plan.accumulate):
                batch = next(batches)
                (loss(batch["tokens"], batch["targets"]) / job.plan.accumulate).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        yield


def prober(job: Job, batch: dict[str, torch.Tensor], loggers: list[Any], file: Path) -> Iterator[None]:
    """Each `next` is one probe with everything that is written about it."""
    for number in range(10**9):
        result = run_probe(job.model, batch["tokens"])
        row = result.row(number, number)
        with open(file, "a") as out:
            out.write(json.dumps(row) + "\n")
        for logger in loggers:
            logger.log_metrics(result.scalars(), step=number)
            logger.log_probe(row)
        yield


def main() -> None:
    """Print one line per call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="training steps per round")
    parser.add_argument("--compiled", action="store_true", help="measure compiled steps beside the eager ones")
    options, overrides = parser.parse_known_args()
    quiet_libraries()
    row = measure(overrides, options.rounds, options.steps, options.compiled)
    print(json.dumps(row | {"threads": torch.get_num_threads()}), file=sys.stdout)


if __name__ == "__main__":
    main()
