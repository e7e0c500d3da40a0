"""A batch size in tokens that stays the same whatever the micro-batch and the device count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polarlm.errors import UserError


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


AUTO_TOKENS = 16384  # what micro_batch_tokens=auto means where no card decides it: training/micro_batch.py


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
    """How the steps of a configured run are cut, and how many there are."""
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
