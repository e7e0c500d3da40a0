"""What the framework adds to a step: our Trainer path against a bare torch loop over the same model and batches.

    python -m benchmarks.framework [--steps 60] [key=value …]

Both run in one process, alternating in rounds, so that the ratio does not see the machine's mood. Prints the step
times, their ratio, and the share of a step spent waiting for data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from polarlm.locations import CONFIGS
from polarlm.training.job import Job, build_job
from polarlm.training.loop import fit, quiet_libraries
from polarlm.training.optimisers import build_optimiser


def composed(overrides: list[str], steps: int) -> dict:
    """The default configuration without validation, diagnostics and wandb."""
    quiet = [
        f"trainer.max_steps={steps}",
        "trainer.val_every=0",
        "logger=none",
        "diagnostics=off",
        f"trainer.checkpoint_every={10**6}",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", overrides=[*overrides, *quiet], return_hydra_config=True)
        choices = cfg.hydra.runtime.choices
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return {
        **plain,
        "choices": {k: v for k, v in choices.items() if "hydra" not in k},
    }


def bare_steps(job: Job) -> list[float]:
    """Seconds of each step of a loop with nothing around it."""
    o = job.config["optim"]
    optimiser = build_optimiser(o, job.model)
    batches: Any = iter(job.data.train_dataloader())
    times = []
    for _ in range(job.steps):
        began = time.perf_counter()
        for _ in range(job.plan.accumulate):
            batch = next(batches)
            (job.model.loss(batch["tokens"], batch["targets"]) / job.plan.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), o["grad_clip"])
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - began)
    batches.close()
    return times


class Watch(pl.Callback):
    """Times whole steps from outside, as a person with a stopwatch would."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index) -> None:
        if (batch_index + 1) % trainer.accumulate_grad_batches == 0:
            self.ends.append(time.perf_counter())


def trainer_steps(config: dict) -> tuple[list[float], list[float]]:
    """Seconds of each step of our own path, and the seconds its logged steps waited for data."""
    job, watch = build_job(config), Watch()
    with tempfile.TemporaryDirectory() as folder:
        fit(job, Path(folder), extra=[watch])
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [b - a for a, b in zip(watch.ends, watch.ends[1:])][:-1]  # the last step also validates
    return steps, [row["time/data"] for row in rows if "time/data" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    quiet_libraries()
    config = composed(overrides, options.steps)
    bare: list[float] = []
    ours: list[float] = []
    data: list[float] = []
    for _ in range(options.rounds):
        bare += bare_steps(build_job(config))[5:]
        steps, waits = trainer_steps(config)
        ours += steps[5:]
        data += waits[1:]
    a, b = statistics.median(bare), statistics.median(ours)
    wait = statistics.median(data) / b
    print(f"bare torch loop  {1000 * a:8.2f} ms per step")
    print(
        f"polarlm          {1000 * b:8.2f} ms per step   ratio {b / a:.3f}   "
        f"waiting for data {100 * wait:.2f} % of a step"
    )
    sys.exit(0)


if __name__ == "__main__":
    main()
