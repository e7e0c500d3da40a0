"""The position-wise half of a block: GELU (GPT-2), SwiGLU (Llama) or squared ReLU at equal parameter count, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.initialisation import FEED_FORWARD_RMS, Initialisation, linear
from polarlm.errors import UserError
from polarlm.operations import operation

SWIGLU_MULTIPLE = 32  # hidden sizes that matrix units like
# RMS of gelu(g), relu(g)^2 and silu(g)*u for unit Gaussians g, u; W_down makes up for it: every kind adds the same.
GELU_RMS, SQUARED_RELU_RMS, SWIGLU_RMS = 0.6521, 1.5**0.5, 0.5965


def _swiglu(x: Tensor) -> Tensor:
    gated, up = x.chunk(2, dim=-1)
    return F.silu(gated) * up


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "swiglu": _swiglu}  # of x, and of x = (gate, up)


@operation
def feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear, kind: str) -> Tensor:
    """W_down f(W_up x), f one of ACTIVATIONS."""
    return down(ACTIVATIONS[kind](up(x)))


class TwoMatrices(nn.Module):
    """W_down f(W_up x), hidden size mult*d; `rms` is that of f of unit Gaussians."""

    rms: float

    def __init__(self, d_model: int, hidden: int, init: Initialisation) -> None:
        super().__init__()
        self.hidden = hidden
        self.up = linear(d_model, hidden, init.hidden(d_model))
        self.down = linear(hidden, d_model, init.residual(hidden, FEED_FORWARD_RMS / self.rms))


class GeluFeedForward(TwoMatrices):
    """f = gelu, as in GPT-2."""

    rms = GELU_RMS

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        return feed_forward(x, self.up, self.down, "gelu")


class SquaredReluFeedForward(TwoMatrices):
    """f = relu^2 (So et al. 2021, "Primer")."""

    rms = SQUARED_RELU_RMS

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        return self.down(F.relu(self.up(x)).square())


class SwiGLUFeedForward(nn.Module):
    """W_down (silu(W_gate x) * W_up x); hidden size 2/3 mult*d, so that three matrices cost as much as GELU's two."""

    def __init__(self, d_model: int, hidden: int, init: Initialisation) -> None:
        super().__init__()
        self.hidden = hidden
        self.gate_up = linear(d_model, 2 * hidden, init.hidden(d_model))
        self.down = linear(hidden, d_model, init.residual(hidden, FEED_FORWARD_RMS / SWIGLU_RMS))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        return feed_forward(x, self.gate_up, self.down, "swiglu")


class NoFeedForward(nn.Module):
    """Adds nothing: a model of mixers alone, as published synthetic tasks use it."""

    def __init__(self, d_model: int, hidden: int, init: Initialisation) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Zeros that keep the norm before it in the graph: DDP wants a gradient of every parameter."""
        return 0 * x


FEED_FORWARDS = {
    "gelu": GeluFeedForward,
    "relu2": SquaredReluFeedForward,
    "swiglu": SwiGLUFeedForward,
    "none": NoFeedForward,
}


def hidden_size(kind: str, d_model: int, mult: float, width: int | None = None) -> int:
    """Hidden channels: `width`, or mult*d (SwiGLU: 2/3 of it, rounded up to what matrix units like)."""
    if width is not None:
        return width
    if kind == "swiglu":
        return -(-int(mult * d_model * 2 / 3) // SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE
    return int(mult * d_model)


def build_feed_forward(
    kind: str, d_model: int, mult: float, init: Initialisation, width: int | None = None
) -> nn.Module:
    """The feed-forward named by `model.ffn`."""
    if kind not in FEED_FORWARDS:
        raise UserError(f"model.ffn is {kind!r}; allowed: {', '.join(FEED_FORWARDS)}.")
    return FEED_FORWARDS[kind](d_model, hidden_size(kind, d_model, mult, width), init)
