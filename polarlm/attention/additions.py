"""Two additions for any mixer: a gate per head, and values mixed with those of the first layer.

A fresh gate is 1, so it starts without effect. A fresh layer takes half of its values from the first layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.mixer import MixerShape, TokenContext

FIRST_VALUES = "first_values"  # where TokenContext.shared keeps them


class HeadGate(nn.Module):
    """2 sigmoid(W x): how much of each head a token takes (Qiu et al. 2025, "Gated Attention", one gate per head).

    Not a linear map of the stream, so Muon leaves it to AdamW. A mixer that reads the raw stream has it normalised.
    """

    def __init__(self, shape: MixerShape, *, raw_stream: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.n_head, shape.d_model))
        self.eps = shape.norm_eps if raw_stream else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, H)."""
        if self.eps is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return 2 * torch.sigmoid(F.linear(x, self.weight))

    def flops_per_token(self) -> int:
        """One product with the gate's rows."""
        return 2 * self.weight.numel()


class ValueResidual(nn.Module):
    """v <- (1 - s) v + s v_first: every layer sees the first layer's values too (ResFormer, Zhou et al. 2024).

    s is learned per layer and starts at 1/2; the first layer has none and hands its values on.
    """

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()
        # One number in a vector: FSDP2 shards no scalars.
        self.share = nn.Parameter(torch.tensor([0.5])) if shape.layer else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        share = state_dict.get(f"{prefix}share")
        if share is not None:  # a scalar in models that were stored before
            state_dict[f"{prefix}share"] = share.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, v: Tensor, context: TokenContext) -> Tensor:
        """Values of the new tokens, in any layout that is the same in every layer; a layer used alone is the first."""
        if self.share is None:
            context.shared[FIRST_VALUES] = v
            return v
        first = context.shared.get(FIRST_VALUES, v)
        return torch.lerp(v, first.to(v.dtype), self.share.to(v.dtype))
