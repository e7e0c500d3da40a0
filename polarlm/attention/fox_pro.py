"""FoX in its Pro form (Lin et al. 2025): forgetting with QK-norm, shifted keys and values, and a gated output.

k_t <- a_t k_{t-1} + (1 - a_t) k_t with a_t = sigmoid(w_h . x_t), before the norm, and v with rates of its own. Every
head's output is normalised with a gain per channel, and multiplied by sigmoid(W_g x). As in FoX there are no positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.element_gated import ElementGatedAttention
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.parts.transport import Turns

UNSHIFTED = "unshifted"  # where a cache keeps the last token's key and value, (B, 2G, 1, Dh)


class ProForgettingAttention(ElementGatedAttention):
    """FoX (Pro)."""

    def __init__(self, shape: MixerShape, *, forget_bias: float = 0.0) -> None:
        super().__init__(shape, qk_norm=True, forgetting="content", forget_bias=forget_bias)
        self.shift_rates = linear(shape.d_model, 2 * shape.n_kv_head, shape.initial.hidden(shape.d_model))
        self.output_gain = nn.Parameter(torch.ones(shape.n_head, 1, shape.head_dim))

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys unchanged: positions come from forgetting."""
        return q, k

    def shift(self, x: Tensor, k: Tensor, v: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Keys and values mixed with the previous token's; the first token of a document has no previous one."""
        both = torch.cat((k, v), dim=1)
        share = torch.sigmoid(self.shift_rates(x)).transpose(1, 2).unsqueeze(-1)
        first = torch.zeros_like(both[:, :, :1])
        if context.cache is not None:
            first = context.cache.running.get(UNSHIFTED, first)
            if both.shape[2]:
                context.cache.running[UNSHIFTED] = both[:, :, -1:]
        before = torch.cat((first, both), dim=2)[:, :, : both.shape[2]]
        if context.documents is not None:
            same = F.pad(context.documents[:, 1:] == context.documents[:, :-1], (1, 0))
            before = before * same[:, None, :, None]
        k, v = torch.lerp(both, before, share).split(k.shape[1], dim=1)
        return k, v

    def leaving(self, v_bar: Tensor) -> Tensor:
        """RMSNorm of every head, with a gain per channel."""
        wide = torch.promote_types(v_bar.dtype, torch.float32)
        normed = F.rms_norm(v_bar.to(wide), v_bar.shape[-1:], eps=self.shape.norm_eps)
        return (normed * self.output_gain).to(v_bar.dtype)

    def flops_per_token(self, context: int) -> int:
        """FLOPs of the gated block and of the shift's rates."""
        return super().flops_per_token(context) + 2 * self.shift_rates.weight.numel()
