"""Tokens per second of two processes against one, on this machine's CPU (gloo); one thread per process.

python -m benchmarks.scaling [--rounds 3] [--steps 12] [settings of train.py …]

The three ways take turns; the best round of each counts, because a busy machine only ever makes a run slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import table

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "1 process": ("trainer=cpu",),
    "2, ddp": ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"),
    "2, fsdp": ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"),
}
COMMON = (
    "trainer.precision=32-true", "trainer.log_every=1", "trainer.val_every=100000", "trainer.checkpoint_every=100000",
    "trainer.batch_tokens=8192", "trainer.micro_batch_tokens=2048", "logger=none", "diagnostics=off",
    "sample.tokens=1", "data.eval_tokens=2048",
)  # fmt: skip


def tokens_per_second(settings: tuple[str, ...], steps: int) -> float:
    """The median over the steps of one run; its first steps, which warm up, are left out."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(ROOT / "train.py"), *COMMON, f"trainer.max_steps={steps}", f"runs_dir={runs}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *settings, "name=run"], env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_second"] for row in rows[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options, settings = parser.parse_known_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, place in WAYS.items():
            speeds[way].append(tokens_per_second((*place, *settings), options.steps))
            print(f"{way}: {speeds[way][-1]:.0f} tokens/s (load average {os.getloadavg()[0]:.1f})", file=sys.stderr)
    one = max(speeds["1 process"])
    rows = [
        {"way": way, "tokens/s": max(rates), "speed-up": max(rates) / one,
         "efficiency": max(rates) / one / (2 if way != "1 process" else 1)}
        for way, rates in speeds.items()
    ]  # fmt: skip
    print(table(rows, ["way", "tokens/s", "speed-up", "efficiency"]))


if __name__ == "__main__":
    main()
