"""Forgetting attention (FoX, Lin et al. 2025): softmax attention with content-dependent forget gates.

A key at j reaches a query at i with the logit q.k/sqrt(Dh) + the sum of log lambda over the tokens j+1 … i, where
lambda_t = sigmoid(w_h . x_t + b_h) is the gate of polarlm/attention/parts/forgetting.py. As published, it has no
other positional encoding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.parts.transport import Turns
from polarlm.attention.standard import StandardAttention


class ForgettingAttention(StandardAttention):
    """Standard attention that forgets; positions come from forgetting, or also from `rope`."""

    def __init__(self, shape: MixerShape, *, rope: bool = False, forgetting: str = "content", **standard: Any) -> None:
        super().__init__(shape, forgetting=forgetting, **standard)
        self.rope = rope

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated if `rope` is on."""
        return super().place(q, k, turns, context) if self.rope else (q, k)
