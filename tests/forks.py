"""Processes forked from one that has imported everything: a start takes milliseconds instead of seconds.

Python has one such server per process, and what it has imported is decided by whoever starts it first: all tests use
this one, so that the order of files does not decide how long each takes.
"""

import multiprocessing
from typing import Any

PRELOAD = [
    "tests.quickly", "torch", "lightning.pytorch", "hydra", "datasets", "polarlm.launch.train", "polarlm.training.loop",
    "polarlm.training.loop", "polarlm.training.module", "polarlm.training.checkpointing", "polarlm.training.incidents",
    "polarlm.training.sharding", "polarlm.evaluation.generate", "torch.distributed.fsdp", "tests.warm",
]  # fmt: skip


def forks() -> Any:
    """The context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
