"""Optimisers, chosen by the `optim` group: each is a function of (model, fused, its options) named by its yaml.

A yaml of the user names a class like torch.optim.SGD, which gets the parameters and its options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.errors import UserError
from polarlm.targets import target_of

# Settings of a step that hold for every optimiser; the rest of the group is the optimiser's own.
STEP_SETTINGS = ("grad_clip",)


def build_optimiser(optim: dict[str, Any], model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """The optimiser that `optim` names, over all trainable parameters of the model."""
    build, options = target_of(optim, "optim", torch.optim.Optimizer)
    options = {key: value for key, value in options.items() if key not in STEP_SETTINGS}
    try:
        is_class = isinstance(build, type)
        optimiser = build(model.parameters(), **options) if is_class else build(model, fused=fused, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optim can't be built: {error}") from error
    keep_constraints(model, optimiser)
    return optimiser


def keep_constraints(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """After every step, let each module that has an `after_step` put its weights back where they belong."""
    constrained: list[Any] = [module for module in model.modules() if hasattr(module, "after_step")]

    def call(*_: Any) -> None:
        for module in constrained:
            module.after_step()

    optimiser.register_step_post_hook(call)


# -- from accumulated gradients to the ones a step is taken with ------------------------------------------------------


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist, in the order of their parameters."""
    return [p.grad for p in parameters if p.grad is not None]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, the same on every process, without waiting for the device."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients (FSDP2) sum over ranks


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place by a number that lives on the device."""
    pieces = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    if pieces:
        torch._foreach_mul_(pieces, factor)


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradients in place so that their total norm is at most `limit`."""
    scale(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
