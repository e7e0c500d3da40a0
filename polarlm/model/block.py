"""One transformer block: x + mixer(norm x), then x + feed-forward(norm x)."""

from __future__ import annotations

from torch import Tensor, nn

from polarlm.attention.mixer import Mixer, TokenContext
from polarlm.model.norm import RMSNorm


class Block(nn.Module):
    """The pre-norm residual frame around any mixer; a mixer with `pre_norm = False` gets the raw stream."""

    mixer: Mixer
    feed_forward: nn.Module

    def __init__(self, mixer: Mixer, feed_forward: nn.Module, d_model: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(d_model, norm_eps) if getattr(mixer, "pre_norm", True) else nn.Identity()
        self.mixer = mixer
        self.ffn_norm = RMSNorm(d_model, norm_eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        mixed = self.mixer(self.mixer_norm(x), context)
        middle = x + self.dropout(mixed)
        after = middle + self.dropout(self.feed_forward(self.ffn_norm(middle)))
        if context.record is not None:
            context.record.update(residual_in=x, residual_mid=middle, residual_out=after)
        return after
