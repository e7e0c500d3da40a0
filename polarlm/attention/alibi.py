"""ALiBi (Press et al. 2022): no rotation; a penalty linear in the lag, with a different slope in each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.parts.transport import Turns
from polarlm.attention.standard import StandardAttention


class AlibiAttention(StandardAttention):
    """softmax(q_i . k_j / sqrt(Dh) - m_h (i - j)) with m_h = 2^(-8h/H), h = 1 … H."""

    slopes: Tensor

    def __init__(
        self, shape: MixerShape, qk_norm: bool = False, head_gate: bool = False, value_residual: bool = False
    ) -> None:
        super().__init__(shape, qk_norm, head_gate=head_gate, value_residual=value_residual)
        self.register_buffer("slopes", torch.tensor(slopes(shape.n_head)), persistent=False)

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys unchanged: positions enter through the bias."""
        return q, k

    def bias(self, x: Tensor, keys: int, context: TokenContext) -> Tensor:
        """-m_h (i - j), (1, H, T, keys); future keys are masked later."""
        time = torch.arange(keys, device=x.device)
        lag = time[keys - x.shape[1] :, None] - time
        return (-self.slopes.to(torch.promote_types(x.dtype, torch.float32))[:, None, None] * lag).unsqueeze(0)


def slopes(heads: int) -> list[float]:
    """The published rates: geometric for a power of two; otherwise every second rate of the next one fills up."""
    power = 2 ** math.floor(math.log2(heads))
    rates = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return rates + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
