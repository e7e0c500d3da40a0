"""Root-mean-square normalisation in fp32 or better, whatever the precision around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.operations import operation


@operation
def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last axis, in fp32 or better; the result has x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), gain.shape, gain.to(wide), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * gain."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has x's dtype."""
        return rms_norm(x, self.weight, self.eps)
