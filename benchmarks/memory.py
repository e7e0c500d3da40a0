"""(b) Peak memory of a training step against context, at the same tokens per batch; one process per point.

python -m benchmarks.memory polar 4096 8192     prints the MB that the steps added to the resident memory
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.blocks import build, training_step


def resident(name: str) -> float:
    """MB in memory now (VmRSS) or at most so far (VmHWM). The maximum of getrusage may be the parent process's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def peak_of_a_step(block: str, context: int, tokens: int) -> float:
    """MB that two training steps add at their peak to the memory of the idle model."""
    model = build(block, context)
    step = training_step(model.loss, model, tokens // context, context)
    before = resident("VmRSS")
    step()
    step()
    return resident("VmHWM") - before


def memory_against_context(blocks: tuple[str, ...], contexts: tuple[int, ...], tokens: int) -> list[dict]:
    """Peak MB per block and context, with the ratio to the first block at the same context."""
    rows: list[dict] = []
    for context in contexts:
        for block in blocks:
            command = [sys.executable, "-m", "benchmarks.memory", block, str(context), str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peak = float(done.stdout.split()[-1])
            base = peak if block == blocks[0] else next(r["MB"] for r in rows[::-1] if r["block"] == blocks[0])
            rows.append({"block": block, "context": context, "MB": peak, "ratio": peak / base})
    return rows


if __name__ == "__main__":
    name, length, count = sys.argv[1:]
    print(peak_of_a_step(name, int(length), int(count)))
