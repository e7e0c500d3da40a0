"""trainer.micro_batch_tokens=auto: as many tokens at once as fit the GPU.

The memory of a step is counted on fake tensors (planning/memory.py), which says where to begin; one real step then
proves it, and where the GPU refuses, half is tried. The number is stored in the run's config.yaml: a resumed run, and
the other processes, take it from there, so that gradients are added up in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.files import read_config
from polarlm.runs.folder import choose_folder
from polarlm.training.batching import AUTO_TOKENS, BatchPlan, plan_batches
from polarlm.training.ranks import is_first, shared_folder

USABLE = 0.9  # of the memory: driver, communication and fragmentation take the rest


def with_micro_batch(config: dict[str, Any], vocabulary: int, accelerator: str, precision: str) -> dict[str, Any]:
    """The configuration with a number where micro_batch_tokens=auto stood, and a note that it was found."""
    if config["trainer"]["micro_batch_tokens"] != "auto":
        return config
    stored = _stored(config)
    if stored is not None:
        tokens = int(stored["trainer"]["micro_batch_tokens"])
    elif accelerator != "cuda":
        tokens = AUTO_TOKENS
    else:
        import torch

        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        processes = config["trainer"]["devices"] * config["trainer"]["nodes"]
        candidates = fitting_tokens(config, vocabulary, precision, processes, memory)
        tokens = first_that_runs(candidates, lambda tokens: _try_step(config, vocabulary, tokens))
        print(f"trainer.micro_batch_tokens=auto: {tokens:,} fit this GPU", file=sys.stderr, flush=True)
    trainer = {**config["trainer"], "micro_batch_tokens": tokens}
    return {**config, "trainer": trainer, "micro_batch_found": True}


def _stored(config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the run that this process continues or belongs to."""
    if not is_first():
        return read_config(shared_folder() / "config.yaml")
    folder, again, _ = choose_folder(config)
    return read_config(folder / "config.yaml") if again else None


def fitting_tokens(
    config: dict[str, Any], vocabulary: int, precision: str, processes: int, memory: float
) -> Iterator[int]:
    """Micro-batches in tokens that should fit `memory` bytes, the largest first, each at most half of the one before.

    Memory is counted for one and two windows: what each further window adds is their difference.
    """
    from polarlm.training.planning.devices import device_memory
    from polarlm.training.planning.plan import count_step, shape_of, untouched_model, weight_bytes

    trainer, model = config["trainer"], config["model"]
    context, strategy = model["context"], "fsdp" if trainer["strategy"] == "fsdp" else "ddp"
    shape = shape_of(untouched_model(config, vocabulary), weight_bytes(precision), processes)

    def peak(windows: int) -> int:
        batch = BatchPlan(context, windows, 2, processes)
        step = count_step(config, vocabulary, batch, precision, recompute=model["checkpointing"])
        return device_memory(step, shape, strategy, processes).peak

    one, two = peak(1), peak(2)
    per_window = max(1, two - one)
    windows = int((USABLE * memory - one) / per_window) + 1
    if windows < 1:
        raise UserError(
            f"One window of {context:,} tokens needs about {one / 1e9:.1f} GB and this GPU has {memory / 1e9:.1f}; "
            "set model.checkpointing=true, or choose a smaller model or model.context"
        )
    while windows >= 1:
        tokens = plan_batches(trainer["batch_tokens"], context, processes, windows * context).micro * context
        yield tokens
        windows = tokens // context // 2


def first_that_runs(candidates: Iterator[int], try_step: Callable[[int], bool]) -> int:
    """The first candidate with which a step runs; says what to do when none does."""
    tried = []
    for tokens in candidates:
        if try_step(tokens):
            return tokens
        tried.append(tokens)
    raise UserError(
        f"No micro-batch fits this GPU (out of memory with {', '.join(f'{t:,}' for t in tried)} tokens); set "
        "model.checkpointing=true, or choose a smaller model or model.context"
    )


def _try_step(config: dict[str, Any], vocabulary: int, tokens: int) -> bool:
    """Whether a step of two micro-batches of so many tokens runs; not compiled, which takes no less memory."""
    import gc

    import torch

    from polarlm.training.step_time import one_step

    alone = {"micro_batch_tokens": tokens, "batch_tokens": 2 * tokens, "devices": 1, "nodes": 1, "compile": False}
    try:
        one_step({**config, "trainer": {**config["trainer"], **alone}}, vocabulary)()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
