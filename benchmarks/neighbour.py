"""What a busy neighbour does: whole training steps alone, and with another process computing on the same cores."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.blocks import build, training_step
from benchmarks.timing import turns

SPIN = "while True: pass"


@contextmanager
def busy_process() -> Iterator[None]:
    """One process that computes for as long as the block lasts."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def with_a_neighbour(blocks: tuple[str, ...], context: int, tokens: int, rounds: int, **shape) -> list[dict]:
    """Median step of each block alone and beside a busy process, and by how much it slowed down."""
    models = {name: build(name, context, **shape) for name in blocks}
    steps = {name: training_step(model.loss, model, tokens // context, context) for name, model in models.items()}
    alone = turns(steps, rounds, warmup=1)
    with busy_process():
        beside = turns(steps, rounds, warmup=1)
    return [
        {
            "block": name,
            "context": context,
            "alone ms": 1e3 * statistics.median(alone[name]),
            "beside ms": 1e3 * statistics.median(beside[name]),
            "slowdown": statistics.median(beside[name]) / statistics.median(alone[name]),
            "worst": max(beside[name]) / statistics.median(alone[name]),
        }
        for name in blocks
    ]
