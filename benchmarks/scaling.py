"""Tokens per second of two processes against one, on this machine's CPU (gloo); one thread per process.

python -m benchmarks.scaling [--rounds 3] [--steps 12] [settings of train.py …]

The three ways take turns; the best round of each counts, because a busy machine only ever makes a run slower. On a
machine that is never quiet processor time says more: what a step costs all processes together, from the difference of a
long and a short run. Two processes that share one process's work without loss need as much as it does; what they need
beyond that is the price of working together, without the waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import table

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # waits for its processes
WAYS = {
    "1 process": ((), ("trainer=cpu",)),
    "2, ddp": (TORCHRUN, ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")),
    "2, fsdp": (TORCHRUN, ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2")),
}
COMMON = (
    "trainer.precision=32-true", "trainer.log_every=1", "trainer.val_every=100000", "trainer.checkpoint_every=100000",
    "trainer.batch_tokens=8192", "trainer.micro_batch_tokens=2048", "logger=none", "diagnostics=off",
    "sample.tokens=1", "data.eval_tokens=2048",
)  # fmt: skip
SHORT = 3  # steps


def run(way: str, steps: int, settings: list[str]) -> tuple[float, float]:
    """(median tokens/s without the first steps, processor seconds of all processes) of one run."""
    launcher, place = WAYS[way]
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *COMMON, *place, *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, f"trainer.max_steps={steps}", f"runs_dir={runs}", "name=run"],
            env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
    speed = statistics.median(row["tokens_per_second"] for row in rows[2:])
    return speed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options, settings = parser.parse_known_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            _, short = run(way, SHORT, settings)
            speed, long = run(way, options.steps, settings)
            speeds[way].append(speed)
            costs[way].append((long - short) / (options.steps - SHORT))
            figures = f"{speed:.0f} tokens/s, {costs[way][-1]:.2f} processor seconds per step"
            print(f"{way}: {figures} (load average {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
    fastest, cheapest = max(speeds["1 process"]), min(costs["1 process"])
    rows = [
        {"way": way, "tokens/s": max(rates), "speed-up": max(rates) / fastest,
         "efficiency": max(rates) / fastest / (1 if way == "1 process" else 2),
         "processor s/step": min(costs[way]), "of one process": cheapest / min(costs[way])}
        for way, rates in speeds.items()
    ]  # fmt: skip
    print(table(rows, list(rows[0])))


if __name__ == "__main__":
    main()
