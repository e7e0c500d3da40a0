"""Precision that travels with the residual stream from layer to layer (Appendix G.3), per head, as logarithms.

A layer gets log P+ of the one before (B, T, H), relaxes it to its own prior P-, lets it widen its queries' variance
(and its keys'), fuses it with the evidence of attention, and hands the posterior on. The first prior is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polarlm.attention.mixer import TokenContext
from polarlm.geometry.precision import log_or_minus_infinity
from polarlm.geometry.uncertainty import carry_to_next_layer, covariance_intersection


def unused_here(layer: int) -> set[str]:
    """Parameters that this layer has no use for: only the first has a prior of its own, only the others relax one."""
    return {"relax_a", "relax_b"} if layer == 0 else {"precision_0"}


@dataclass(frozen=True)
class Prior:
    """What a layer knows about its tokens before it attends."""

    log_precision: Tensor  # (B, T, H) log P-
    parameters: Mapping[str, Tensor]
    layer: int

    def log_variance(self, side: str) -> Tensor | None:
        """log(c/P-) (B, H, T) that the uncertain token adds as a query (`q`) or as a key (`k`); None where c = 0."""
        share = self.parameters.get(f"widen_{side}")
        if share is None:
            return None
        return (log_or_minus_infinity(share, self.log_precision) - self.log_precision).transpose(1, 2)

    def fuse(self, v: Tensor, v_bar: Tensor, log_evidence: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        """v + alpha (v_bar - v) (B, T, H, Dh) and log P+ (B, T, H), which the next layer is left.

        Evidence is counted as (i+1)^-gamma of itself: what many tokens say is not independent.
        """
        if context.positions is None:
            raise ValueError("block.uncertainty=carry needs TokenContext.positions")
        index = torch.atleast_2d(context.positions)  # how many tokens of its document stand before each
        discount = self.parameters["context_power"] * (index + 1).to(log_evidence.dtype).log()[..., None]
        log_posterior, step = covariance_intersection(
            self.log_precision, log_evidence - discount, self.parameters["prior_share"]
        )
        context.shared[_key(self.layer)] = log_posterior
        if context.record is not None:
            context.record.update(
                log_prior_precision=self.log_precision.transpose(1, 2),
                log_posterior_precision=log_posterior.transpose(1, 2),
                fusion_step=step.transpose(1, 2),
            )
        return torch.lerp(v, v_bar, step.to(v.dtype).unsqueeze(-1)), log_posterior


def prior_of(x: Tensor, context: TokenContext, layer: int, parameters: Mapping[str, Tensor]) -> Prior:
    """The prior of the tokens x (B, T, d) from the posterior that the layer before left; without one, P = 1."""
    log_precision = context.shared.get(_key(layer - 1))
    if log_precision is None:
        start = parameters["precision_0"] if layer == 0 else torch.ones_like(parameters["relax_a"])
        log_precision = start.log().expand(*x.shape[:2], -1)
    if layer > 0:
        log_precision = carry_to_next_layer(log_precision, parameters["relax_a"], parameters["relax_b"])
    return Prior(log_precision, parameters, layer)


def remembered(context: TokenContext, log_variance: Tensor | None) -> Tensor | None:
    """Key variances (B, H, S) of all tokens in view, from those of the new ones; a cache keeps them."""
    if log_variance is None or context.cache is None:
        return log_variance
    before = context.cache.running.get("key_variance")
    together = log_variance if before is None else torch.cat((before, log_variance), dim=-1)
    context.cache.running["key_variance"] = together
    return together


def _key(layer: int) -> str:
    # One per layer: a block that is computed again in the backward pass must find its own predecessor's.
    return f"log_precision_{layer}"
