"""Forgetting attention (FoX, Lin et al. 2025): soft-max attention in which every token decides how much is forgotten.

f_t = sigmoid(w_h . x_t + b_h) per head; a key at j reaches a query at i with the logit q.k/sqrt(Dh) + sum of log f over
the tokens j+1 … i. The learned decay depends on the content, where Polar's mu is a constant of the head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.frequencies import Turns
from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.standard import StandardAttention

FORGOTTEN = "forgotten"  # where a cache keeps the running sums of log f


class ForgetGate(nn.Module):
    """log f_t of every head. Not a linear map of the stream, so Muon leaves it to AdamW."""

    def __init__(self, shape: MixerShape, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.n_head, shape.d_model) * shape.initial.hidden(shape.d_model))
        self.offset = nn.Parameter(torch.full((shape.n_head,), bias))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, H, T), in fp32 or better: sums over many tokens are taken of it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide), self.offset.to(wide))
        return F.logsigmoid(logits).transpose(1, 2)


class ForgettingAttention(StandardAttention):
    """softmax(q_i . k_j / sqrt(Dh) + sum_{l=j+1..i} log f_l); positions come from forgetting, or also from `rope`."""

    def __init__(self, shape: MixerShape, *, rope: bool = False, forget_bias: float = 0.0, **standard: Any) -> None:
        super().__init__(shape, **standard)
        self.rope = rope
        self.forget = ForgetGate(shape, forget_bias)

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Rotated only when asked for."""
        return super().place(q, k, turns, context) if self.rope else (q, k)

    def bias(self, x: Tensor, keys: int, context: TokenContext) -> Tensor:
        """D_ij = c_i - c_j with the running sums c of log f, (B, H, T, keys); never positive in the past."""
        log_forget = self.forget(x)
        total = log_forget.cumsum(-1)
        if context.record is not None:
            context.record["log_forget"] = log_forget
        everything = total
        if context.cache is not None:
            seen = context.cache.running.get(FORGOTTEN)
            if seen is not None:
                total = total + seen[..., -1:].to(total.dtype)
                everything = torch.cat([seen, total], dim=-1)
            context.cache.running[FORGOTTEN] = everything
        return total.unsqueeze(-1) - everything.unsqueeze(-2)

    def flops_per_token(self, context: int) -> int:
        """Standard attention and the gate."""
        return super().flops_per_token(context) + 2 * self.forget.weight.numel()
