"""The memory of one training step, counted without computing it.

The step runs on fake tensors (shapes without numbers), and every storage is counted from its first use until nothing
holds it. A model of two and one of three layers are enough: what a further layer adds is their difference.
"""

from __future__ import annotations

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
    workspace: int  # what comes and goes on top of that: logits, gradients of activations
    update: int  # beside the first three: what the optimiser's step, or the first layer's gradients, need
    accumulates: bool  # gradients of earlier micro-batches are there during the forward pass

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        computing = self.weights + self.optimiser + self.activations + self.workspace
        computing += self.gradients if self.accumulates else 0
        return max(computing, self.weights + self.optimiser + self.gradients + self.update)


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
    # These are the same whatever the depth: one is reached above the last layer, the other below the first.
    return StepMemory(**parts, workspace=few[1].workspace, update=few[1].update, accumulates=accumulate > 1)


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
            between, upper, lower = _micro_batch(model, tokens, precision, live)
    lower -= weights + state + gradients
    return StepMemory(weights, gradients, state, between - before, upper - between, max(update, lower), accumulates)


def _micro_batch(model: GPT, tokens: Tensor, precision: str, live: LiveBytes) -> tuple[int, int, int]:
    """Forward and backward; the bytes in between, the peak above the last layer, and the peak in the first layer.

    In the layers between them the activations shrink while the gradients grow, both evenly: one of the two is the peak.
    16-mixed is counted as bf16-mixed, which is as large.
    """
    peaks: list[int] = []

    def last_layer_done(_: Tensor) -> None:
        peaks.append(live.peak)

    def first_layer_begins(_: Tensor) -> None:
        live.reset()

    def watch(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        if block is blocks[-1]:
            inputs[0].register_hook(last_layer_done)
        if block is blocks[min(1, len(blocks) - 1)]:
            inputs[0].register_hook(first_layer_begins)

    blocks = list(model.blocks)
    hooks = [block.register_forward_pre_hook(watch) for block in blocks]
    live.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.endswith("-mixed")):
        loss = model.loss(tokens, tokens, reduction="sum") / tokens.numel()
    between = live.now
    for hook in hooks:  # a layer that is recomputed in the backward pass is not watched again
        hook.remove()
    loss.backward()
    return between, peaks[0], live.peak


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
    from polarlm.attention.kernels import distrust

    distrust("native", "cpu")
