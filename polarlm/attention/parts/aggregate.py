"""Step 5 of Algorithm 1: the weighted mean of the values, or values gated by their correlation (Appendix G.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polarlm.attention.estimator import choice
from polarlm.attention.mixer import mean_visible
from polarlm.attention.parts.influence import LOGIT_FLOPS
from polarlm.attention.parts.part import OFF, Part
from polarlm.attention.robust import CONSENSUS

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention


class Aggregate(Part):
    """`consensus` none is the mean; gate and complex weigh values where tokens disagree."""

    def __init__(self, block: PolarAttention, *, consensus: str | bool) -> None:
        super().__init__(block)
        self.consensus = choice("consensus", consensus, CONSENSUS, OFF)

    def flops_per_token(self, context: int) -> int:
        """Correlations of its own (`vv`), the gate, and complex parts where asked for."""
        if self.consensus == "none":
            return 0
        parts, size = self.block.parts, self.block.rotary_dim
        per_pair = LOGIT_FLOPS + (2 * size if parts.radial.radial_correlation == "vv" else 0)
        if self.consensus == "complex":  # imaginary parts of residual, correlation and sum
            per_pair += 2 * size * (3 if parts.radial.radial_correlation != "one" else 1)
        return parts.influence.irls_steps * int(mean_visible(context) * self.block.shape.n_head * per_pair)
