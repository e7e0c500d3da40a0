"""The position-wise half of a block: GELU (GPT-2) or SwiGLU (Llama), at equal parameter count."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.initialisation import Initialisation, linear
from polarlm.errors import UserError

SWIGLU_MULTIPLE = 32  # hidden sizes that matrix units like


class GeluFeedForward(nn.Module):
    """W_down gelu(W_up x), hidden size mult*d."""

    def __init__(self, d_model: int, mult: float, init: Initialisation) -> None:
        super().__init__()
        self.hidden = int(mult * d_model)
        self.up = linear(d_model, self.hidden, init.hidden(d_model))
        self.down = linear(self.hidden, d_model, init.residual(self.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        return self.down(F.gelu(self.up(x)))


class SwiGLUFeedForward(nn.Module):
    """W_down (silu(W_gate x) * W_up x); hidden size 2/3 mult*d, so that three matrices cost as much as GELU's two."""

    def __init__(self, d_model: int, mult: float, init: Initialisation) -> None:
        super().__init__()
        self.hidden = -(-int(mult * d_model * 2 / 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE
        self.gate_up = linear(d_model, 2 * self.hidden, init.hidden(d_model))
        self.down = linear(self.hidden, d_model, init.residual(self.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


FEED_FORWARDS = {"gelu": GeluFeedForward, "swiglu": SwiGLUFeedForward}


def build_feed_forward(kind: str, d_model: int, mult: float, init: Initialisation) -> nn.Module:
    """The feed-forward named by `model.ffn`."""
    if kind not in FEED_FORWARDS:
        raise UserError(f"model.ffn is {kind!r}; allowed: {', '.join(FEED_FORWARDS)}.")
    return FEED_FORWARDS[kind](d_model, mult, init)
