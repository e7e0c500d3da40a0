"""From accumulated gradients to the ones a step is taken with.

We clip ourselves because Lightning refuses to clip for fused optimisers under mixed precision, although only its
GradScaler (16-mixed) has a reason to: there the optimiser is not fused, so gradients arrive here unscaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


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
