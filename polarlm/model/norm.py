"""Root-mean-square normalisation in fp32 or better, whatever the precision around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polarlm.attention.rows import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * gain."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has x's dtype."""
        if x.dtype == self.weight.dtype == torch.float32:
            return rms_norm(x, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), self.weight.to(wide), self.eps).to(x.dtype)
