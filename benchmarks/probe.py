"""What looking inside costs: one probe against the training steps between two probes, in one process.

    python -m benchmarks.probe [--rounds 5] [--steps 4] [key=value …]

Steps and probes alternate, so that the share does not see the machine's mood. A probe is everything the callback does:
the recorded forward pass, the statistics, the line of probe.jsonl, the flat scalars and wandb's charts (offline).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.spine import composed
from polarlm.diagnostics import run_probe
from polarlm.launch.train import prepare, quiet_libraries
from polarlm.training.loggers import build_loggers, finish_loggers
from polarlm.training.optimiser import build_adamw
from polarlm.training.probing import probe_batch


def measure(overrides: list[str], rounds: int, steps: int) -> dict[str, float | str]:
    """Seconds per step and per probe (medians over rounds) and the share of training time at the default interval."""
    config = composed(overrides, steps)
    every, tokens, length = 200, 2048, 1024  # configs/diagnostics/default.yaml
    job = prepare(config)
    o = config["optim"]
    optimiser = build_adamw(job.model, **{key: value for key, value in o.items() if key != "grad_clip"})
    batches, batch = iter(job.data.train_dataloader()), probe_batch(job.data, tokens=tokens, length=length)
    os.environ["WANDB_MODE"] = "offline"
    step_times, probe_times = [], []
    with tempfile.TemporaryDirectory() as folder:
        config["logger"] = {"kind": "wandb", "project": "benchmark", "entity": None, "mode": "offline"}
        loggers = build_loggers(config, Path(folder))
        file = Path(folder) / "probe.jsonl"
        for number in range(rounds + 1):  # the first round warms up
            began = time.perf_counter()
            for _ in range(steps):
                for _ in range(job.plan.accumulate):
                    one = next(batches)
                    (job.model.loss(one["tokens"], one["targets"]) / job.plan.accumulate).backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            middle = time.perf_counter()
            found = run_probe(job.model, batch["tokens"])
            with open(file, "a") as out:
                out.write(json.dumps(found.row(number, number)) + "\n")
            for logger in loggers:
                logger.log_metrics(found.scalars())
                logger.log_probe(found, step=number, tokens=number)
            if number:
                step_times.append((middle - began) / steps)
                probe_times.append(time.perf_counter() - middle)
        finish_loggers(loggers, "finished")
    step, probe = statistics.median(step_times), statistics.median(probe_times)
    share = probe / (every * step + probe)
    name = f"{config['choices']['block']} {config['choices']['model']}"
    return {"run": name, "step_seconds": step, "probe_seconds": probe, "every": every, "share": share}


def main() -> None:
    """Print one line per call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="training steps per round")
    options, overrides = parser.parse_known_args()
    quiet_libraries()
    found = measure(overrides, options.rounds, options.steps)
    print(json.dumps(found | {"threads": torch.get_num_threads()}), file=sys.stdout)


if __name__ == "__main__":
    main()
