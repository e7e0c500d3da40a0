"""What many devices add to a step: memory of their own, and bytes that each of them sends.

DDP (as Lightning sets it up) keeps a copy of the gradients in its buckets and averages them once per step. FSDP2 keeps
1/n of weights, gradients and optimiser state, and gathers what it needs: the embedding and output for the whole pass,
one block while it computes and the next one ahead (in a buffer, from which it is copied); every micro-batch gathers and
reduces again. The buffer that a block's gradients were reduced from stays until the next block's are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polarlm.training.planning.gpus import Gpu
from polarlm.training.planning.memory import StepMemory


@dataclass(frozen=True)
class Shape:
    """The parts of a model that FSDP handles as one: bytes of a block, and of all that is in no block."""

    block: int
    layers: int
    outside: int

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.block * self.layers + self.outside


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each GPU, and the most that are held at once."""

    weights: int
    gradients: int
    optimiser: int
    activations: int
    workspace: int
    parallel: int  # gradient buckets (DDP), gathered weights and buffers (FSDP)
    peak: int


def device_memory(step: StepMemory, shape: Shape, strategy: str, devices: int) -> DeviceMemory:
    """What one of `devices` GPUs holds; FSDP's share is of `shape`, whose rows are equal for all."""
    share = shape.whole / step.weights / devices if strategy == "fsdp" else 1.0
    weights, gradients, state = (math.ceil(part * share) for part in (step.weights, step.gradients, step.optimiser))
    full = step.activations + (gradients if step.accumulates else 0)
    # The moments that can be the fullest: (what one device alone would hold, what many add).
    if strategy == "fsdp" and devices > 1:
        block, outside, layer = shape.block, shape.outside, step.activations // shape.layers
        # Gradients of embedding and output stay whole until the end; in every micro-batch they are new ones.
        again = outside if step.accumulates else 0
        moments = [
            (full + step.output, outside + block),
            (full + step.last_block, outside + again + 2 * block),
            # From the second block of the backward pass on: gathered, fetched ahead, its gradients, those before them.
            (full - layer + step.last_block, outside + again + 3 * block),
            (full - 2 * layer, 2 * outside + 4 * block),
            (gradients + step.first_block + layer, 2 * outside + 4 * block),
            (gradients + step.embedding, 2 * outside + block),
            (gradients + step.update, 0),
        ]
    else:
        buckets = step.gradients if devices > 1 else 0
        ending = gradients + max(step.first_block, step.embedding, step.update)
        moments = [(full + step.workspace, buckets), (ending, buckets)]
    held, added = max(moments, key=sum)
    return DeviceMemory(
        weights, gradients, state, step.activations, step.workspace, added, weights + state + held + added
    )


@dataclass(frozen=True)
class Traffic:
    """What one GPU sends in one optimiser step, and how long its slowest link takes for that."""

    sent: float  # bytes
    seconds: float
    link: str


def traffic(
    shape: Shape, gradient_bytes: int, strategy: str, gpu: Gpu, *, devices: int, per_node: int, accumulate: int
) -> Traffic:
    """Rings: a gather or a reduction sends (n−1)/n of the whole from every GPU, an average is one of each.

    Between nodes every ring of a node's GPUs has its own adapter, so each GPU sends its share at its adapter's rate.
    """
    if devices == 1:
        return Traffic(0.0, 0.0, "none")
    around = (devices - 1) / devices
    if strategy == "ddp":
        sent = 2 * around * gradient_bytes
    else:
        again = shape.block * shape.layers  # the backward pass gathers the blocks once more
        sent = accumulate * around * (shape.whole + again + gradient_bytes)
    crosses = devices > per_node
    rate = (gpu.between if crosses else gpu.inside) * 1e9
    return Traffic(sent, sent / rate, "network" if crosses else "node")
