"""What many devices add to a step: memory of their own, and bytes that each of them sends.

DDP (as Lightning sets it up) keeps a copy of the gradients in its buckets and averages them once per step. FSDP2 keeps
1/n of weights, gradients and optimiser state, and gathers what it needs: the embedding and output for the whole pass,
one block while it computes and the next one ahead; every micro-batch gathers and reduces again.
"""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.training.planning.gpus import Gpu
from polarlm.training.planning.memory import StepMemory

GATHERED_BLOCKS = 2  # the one that computes and the one that is fetched meanwhile
REDUCED_BLOCKS = 2  # a block's whole gradients, and the buffer from which they are reduced


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
    """What one of `devices` GPUs holds."""
    share, extra_computing, extra_update = 1, 0, 0
    if strategy == "ddp" and devices > 1:
        extra_computing = extra_update = step.gradients
    elif strategy == "fsdp" and devices > 1:
        share = devices
        extra_computing = shape.outside + (GATHERED_BLOCKS + REDUCED_BLOCKS) * shape.block
        # At the end of the backward pass the gradients of embedding and output are whole, and copied to be reduced.
        extra_update = 3 * shape.outside
    weights, gradients, state = (-(-part // share) for part in (step.weights, step.gradients, step.optimiser))
    computing = weights + state + step.activations + step.workspace + extra_computing
    computing += gradients if step.accumulates else 0
    peak = max(computing, weights + gradients + state + step.update + extra_update)
    parallel = max(extra_computing, extra_update)
    return DeviceMemory(weights, gradients, state, step.activations, step.workspace, parallel, peak)


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
