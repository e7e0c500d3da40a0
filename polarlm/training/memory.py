"""The memory of one training step, counted without computing it.

The step runs on fake tensors (shapes without numbers), and every storage is counted from its first use until nothing
holds it. A model of two and one of three layers are enough: what a further layer adds is their difference.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polarlm.model import GPT
from polarlm.training.gpus import Gpu
from polarlm.training.optimisers import build_optimiser

FEWEST_LAYERS = 2
# Operators that make a copy of their input inside, where no dispatch mode sees it: on CPUs and GPUs alike.
COPIES_INSIDE = (torch.ops.aten.logsumexp.default,)


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device without anything that several devices add."""

    weights: int
    gradients: int
    optimiser: int
    activations: int  # what the forward pass leaves for the backward pass
    # What comes and goes on top of that: until the backward pass enters the last block (logits), and in that block.
    output: int
    last_block: int
    # What the end of a step needs beside weights, optimiser and all gradients: in the first block's backward pass, in
    # the embedding's, in the optimiser's step.
    first_block: int
    embedding: int
    update: int
    accumulates: bool  # gradients of earlier micro-batches are there during the forward pass

    @property
    def workspace(self) -> int:
        """Temporary memory on top of the activations."""
        return max(self.output, self.last_block)


def step_memory(
    build: Callable[[int], GPT], layers: int, *, rows: int, precision: str, optim: dict[str, Any], accumulate: int
) -> StepMemory:
    """Memory of a step of `accumulate` micro-batches of `rows` windows; `build(n)` makes the model with n layers."""
    options: dict[str, Any] = {"rows": rows, "precision": precision, "optim": optim, "accumulates": accumulate > 1}
    few = [_counted(build(min(n, layers)), **options) for n in (FEWEST_LAYERS, FEWEST_LAYERS + 1)]
    more = max(0, layers - FEWEST_LAYERS - 1)
    parts = {
        name: getattr(few[1], name) + more * (getattr(few[1], name) - getattr(few[0], name))
        for name in ("weights", "gradients", "optimiser", "activations")
    }
    # The others are the same whatever the depth: they are reached above and in the last layer, or in the first.
    return dataclasses.replace(few[1], **parts)


def _counted(model: GPT, *, rows: int, precision: str, optim: dict[str, Any], accumulates: bool) -> StepMemory:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = model.to({"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)).train()
    trust_kernels()
    live, pretence = LiveBytes(), FakeTensorMode()
    replace_weights(model, pretence)
    with pretence:
        optimiser = build_optimiser(optim, model, fused=precision != "16-mixed")
        tokens = torch.zeros(rows, model.config.context, dtype=torch.long)
        for parameter in model.parameters():
            live.add(parameter)
        weights = live.now
        with live:
            # A first step creates the optimiser's state; what comes then is what every later step is like.
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            gradients = live.now - weights
            live.reset()
            optimiser.step()
            update, state = live.peak - live.now, live.now - weights - gradients
            if not accumulates:
                optimiser.zero_grad(set_to_none=True)
            before = live.now
            between, peaks = _micro_batch(model, tokens, precision, live)
    output, last = (peak - between for peak in peaks[:2])
    first, embedding = (peak - weights - state - gradients for peak in peaks[2:])
    return StepMemory(weights, gradients, state, between - before, output, last, first, embedding, update, accumulates)


def _micro_batch(model: GPT, tokens: Tensor, precision: str, live: LiveBytes) -> tuple[int, list[int]]:
    """Forward and backward: the bytes in between; the peaks until the last block, in it, in the first and below it.

    In the layers between them the activations shrink while the gradients grow, both evenly: one of the two is the peak.
    16-mixed is counted as bf16-mixed, which is as large.
    """
    peaks: dict[str, int] = {}

    def watch(tensor: Tensor, ends: str) -> None:
        """When the backward pass is at this tensor, a part of it ends."""

        def end(_: Tensor) -> None:
            peaks[ends] = live.peak
            live.reset()

        tensor.register_hook(end)

    def before(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        if block in ends:
            watch(inputs[0], ends[block])

    def after(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if block is blocks[-1]:
            watch(output, "output")

    blocks = list(model.blocks)
    # Of one layer alone the first is the last; of two, what comes before the first is the last.
    ends = {blocks[min(1, len(blocks) - 1)]: "between", blocks[-1]: "last", blocks[0]: "first"}
    hooks = [hook for b in blocks for hook in (b.register_forward_pre_hook(before), b.register_forward_hook(after))]
    live.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.endswith("-mixed")):
        loss = model.loss(tokens, tokens, reduction="sum") / tokens.numel()
    between = live.now
    for hook in hooks:  # a layer that is recomputed in the backward pass is not watched again
        hook.remove()
    loss.backward()
    return between, [peaks["output"], peaks.get("last", peaks["first"]), peaks["first"], live.peak]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def reset(self) -> None:
        """Begin a new peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if func in COPIES_INSIDE:
            self.peak = max(self.peak, self.now + args[0].nbytes)
        return result


class UntouchedWeights(TorchFunctionMode):
    """Leaves fresh matrices unwritten: memory that nobody writes to is not taken from the machine."""

    RANDOM = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def replace_weights(model: nn.Module, pretence: Any) -> None:
    """Put fake tensors in the place of parameters and buffers; tied ones stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the original is kept, or its id could be given again
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is None:
                    continue
                if id(value) not in made:
                    fake = pretence.from_tensor(value.detach())
                    is_parameter = isinstance(value, nn.Parameter)
                    made[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake, value
                holder[name] = made[id(value)][0]  # type: ignore[assignment]


def trust_kernels() -> None:
    """Let the native kernels be checked now, on numbers: fake tensors have none to compare."""
    if importlib.util.find_spec("polarlm.fast") is not None:
        from polarlm.fast.backends import distrust

        distrust("native", "cpu")


# -- what many devices add --------------------------------------------------------------------------------------------


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
    """What one of `devices` GPUs holds; FSDP's share is of `shape`, whose rows are equal for all.

    DDP (as Lightning sets it up) keeps a copy of the gradients in its buckets and averages them once per step. FSDP2
    keeps 1/n of weights, gradients and optimiser state, and gathers what it needs: the embedding and output for the
    whole pass, one block while it computes and the next one ahead (in a buffer, from which it is copied); every
    micro-batch gathers and reduces again. The buffer that a block's gradients were reduced from stays until the next
    block's are.
    """
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
