"""Step 3 of Algorithm 1: how much a token's information counts, and the noise it is measured with.

With `uncertainty=carry` precision travels with the residual stream from layer to layer (Appendix G.3), per head, as
logarithms. A layer gets log P+ of the one before (B, T, H), relaxes it to its own prior P-, lets it widen its queries'
variance (and its keys'), fuses it with the evidence of attention, and hands the posterior on. The first prior is
learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polarlm.attention.estimator import NOISE_SPLIT, Value, choice, decay_rates, per_head, scalar
from polarlm.attention.mixer import TokenContext, mean_visible
from polarlm.attention.parts.part import OFF, Part
from polarlm.geometry.precision import carry_to_next_layer, covariance_intersection, log_or_minus_infinity

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

CARRIED = ("prior_share", "context_power", "precision_0", "relax_a", "relax_b", "widen_q", "widen_k")
MATCHED = {"eta_tk": "k", "eta_tq": "q", "sigma_t0": "0"}  # left as None, they share the matched variance
UNIT = {"on": "own", "true": "own", "off": "unit", "false": "unit"}  # what a yaml makes of `on` and `off`
WIDENING_FLOPS = 5  # of 1/(1/kappa + variance) in logarithms, per pair and head


class Precision(Part):
    """kappa = (m^2 E^2 + m_inf^2) / noise with E = e^(-mu lag); `magnitude=unit` leaves the lag alone to decide."""

    def __init__(
        self,
        block: PolarAttention,
        *,
        magnitude: str | bool,
        mu: Value,
        mu_spread: bool,
        m_inf: float,
        eta_tk: Value | None,
        sigma_t0: Value | None,
        radial_flow: str,
        m_eq: float,
        uncertainty: str | bool,
        prior_share: Value,
        context_power: Value,
        precision_0: Value,
        relax_a: Value,
        relax_b: Value,
        widen_q: Value,
        widen_k: Value,
    ) -> None:
        super().__init__(block)
        self.magnitude = choice("magnitude", magnitude, ("own", "unit"), UNIT)
        self.radial_flow = choice("radial_flow", radial_flow, ("decay", "equilibrium"))
        self.uncertainty = choice("uncertainty", uncertainty, ("none", "carry"), OFF)
        self.mu, self.mu_spread, self.m_inf, self.m_eq = mu, mu_spread, m_inf, m_eq
        self.eta_tk, self.sigma_t0 = eta_tk, sigma_t0
        self.prior_share, self.context_power, self.precision_0 = prior_share, context_power, precision_0
        self.relax_a, self.relax_b, self.widen_q, self.widen_k = relax_a, relax_b, widen_q, widen_k

        heads, parts = block.shape.n_head, block.parts
        self.scalars = {name: per_head(name, getattr(self, name), heads) for name in CARRIED}
        self.scalars |= {name: scalar(name, getattr(self, name)) for name in ("m_inf", "m_eq")}
        information = parts.inputs.scalars["radius"].square() * (1 + self.scalars["m_inf"].square())  # at m = 1, lag 0
        total = parts.influence.matched_variance(block.rotary_dim) * information
        for name, value in (("eta_tk", eta_tk), ("eta_tq", parts.influence.eta_tq), ("sigma_t0", sigma_t0)):
            matched = (NOISE_SPLIT[MATCHED[name]] * total).sqrt()
            self.scalars[name] = matched if value is None else per_head(name, value, heads)
        self.scalars["mu"] = decay_rates("mu", mu, mu_spread, heads)
        # Only the first layer has a prior of its own, only the others relax one; nothing is widened by a share of 0.
        absent = {"relax_a", "relax_b"} if block.shape.layer == 0 else {"precision_0"}
        absent |= {name for name in ("widen_q", "widen_k") if not bool(self.scalars[name].any())}
        self.scalars = {name: value for name, value in self.scalars.items() if name not in absent}
        # Without a noise floor, decay makes precision grow with the lag towards m_inf^2/0.
        floorless = (self.scalars["sigma_t0"] == 0) & (self.scalars["mu"] > 0) & (self.scalars["m_inf"] > 0)
        self.bounded = not bool(floorless.any())
        self.carried = self.uncertainty == "carry"

    def prior(self, x: Tensor, context: TokenContext, p: Mapping[str, Tensor]) -> Prior:
        """The prior of the tokens x (B, T, d) from the posterior that the layer before left; without one, P = 1."""
        layer = self.block.shape.layer
        log_precision = context.shared.get(_key(layer - 1))
        if log_precision is None:
            start = p["precision_0"] if layer == 0 else torch.ones_like(p["relax_a"])
            log_precision = start.log().expand(*x.shape[:2], -1)
        if layer > 0:
            log_precision = carry_to_next_layer(log_precision, p["relax_a"], p["relax_b"])
        return Prior(log_precision, p, layer, context)

    def unused(self) -> set[str]:
        """Only carried precision has a prior, only a flow an equilibrium."""
        idle = set(CARRIED) if self.uncertainty == "none" else set()
        idle |= {"m_eq"} if self.radial_flow == "decay" else set()
        return idle

    def flops_per_token(self, context: int) -> int:
        """Of variances that tokens bring along, once per precision of every pair."""
        widened = sum(name in self.block.estimator for name in ("widen_q", "widen_k", "widen_k"))  # a key's also kappa
        steps, heads = self.block.parts.influence.irls_steps, self.block.shape.n_head
        return steps * widened * int(mean_visible(context) * heads * WIDENING_FLOPS)


@dataclass(frozen=True)
class Prior:
    """What a layer knows about its tokens before it attends."""

    log_precision: Tensor  # (B, T, H) log P-
    parameters: Mapping[str, Tensor]
    layer: int
    context: TokenContext

    def log_variance(self, side: str) -> Tensor | None:
        """log(c/P-) (B, H, T) that the uncertain token adds as a query (`q`) or as a key (`k`); None where c = 0."""
        share = self.parameters.get(f"widen_{side}")
        if share is None:
            return None
        return (log_or_minus_infinity(share, self.log_precision) - self.log_precision).transpose(1, 2)

    def fuse(self, v: Tensor, v_bar: Tensor, log_evidence: Tensor) -> tuple[Tensor, Tensor]:
        """v + alpha (v_bar - v) (B, T, H, Dh) and log P+ (B, T, H), which the next layer is left.

        Evidence is counted as (i+1)^-gamma of itself: what many tokens say is not independent.
        """
        context = self.context
        if context.positions is None:
            raise ValueError("block/precision=carried needs TokenContext.positions")
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
