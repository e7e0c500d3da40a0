"""One transformer block: x + mixer(norm x), then x + feed-forward(norm x); or norm(x + mixer(x)) and so on."""

from __future__ import annotations

from torch import Tensor, nn

from polarlm.attention.mixer import Mixer, TokenContext
from polarlm.model.norm import RMSNorm


class Block(nn.Module):
    """The residual frame around any mixer.

    `pre` normalises what enters a branch and keeps the stream's magnitude from layer to layer; a mixer with
    `pre_norm = False` gets the raw stream. `post` normalises the stream after each addition, which discards the
    magnitude (Appendix E).
    """

    mixer: Mixer
    feed_forward: nn.Module

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: nn.Module,
        d_model: int,
        dropout: float,
        norm_eps: float,
        frame: str = "pre",
    ) -> None:
        super().__init__()
        self.post = frame == "post"
        normalised = self.post or getattr(mixer, "pre_norm", True)
        self.mixer_norm = RMSNorm(d_model, norm_eps) if normalised else nn.Identity()
        self.mixer = mixer
        self.ffn_norm = RMSNorm(d_model, norm_eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        if self.post:
            middle = self.mixer_norm(x + self.dropout(self.mixer(x, context)))
            after = self.ffn_norm(middle + self.dropout(self.feed_forward(middle)))
        else:
            middle = x + self.dropout(self.mixer(self.mixer_norm(x), context))
            after = middle + self.dropout(self.feed_forward(self.ffn_norm(middle)))
        if context.record is not None:
            context.record.update(residual_in=x, residual_mid=middle, residual_out=after)
        return after
