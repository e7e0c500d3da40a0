"""Steps 4 and 5 of Algorithm 1: the robust weight of a key given its distance, and the robust mean."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polarlm.attention.estimator import Value, choice, matched_variance, per_head
from polarlm.attention.mixer import Record, mean_visible
from polarlm.attention.parts.part import Part
from polarlm.attention.robust import (
    PLAIN_KERNELS,
    RESIDUAL_FORMS,
    AttentionOutput,
    RobustCall,
    robust_attention,
)
from polarlm.errors import UserError
from polarlm.geometry.sphere import on_sphere

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

# Element-wise work per query-key pair and head: two precisions, the residual, the kernel and its logarithm.
LOGIT_FLOPS = 16


class Influence(Part):
    """The robust weight w(s) of a squared distance s; `irls_steps` reweights around what the keys agreed on."""

    def __init__(
        self,
        block: PolarAttention,
        *,
        kernel: str,
        residual_form: str,
        irls_steps: int,
        nu_t: Value,
        tau: Value,
        eta_tq: Value | None,
    ) -> None:
        super().__init__(block)
        self.kernel = choice("kernel", kernel, PLAIN_KERNELS)
        self.residual_form = choice("residual_form", residual_form, RESIDUAL_FORMS)
        if isinstance(irls_steps, bool) or not isinstance(irls_steps, int) or irls_steps < 1:
            raise UserError(f"block.influence.irls_steps is {irls_steps!r}; it must be a whole number of at least 1.")
        self.irls_steps, self.nu_t, self.tau, self.eta_tq = irls_steps, nu_t, tau, eta_tq
        heads = block.shape.n_head
        self.scalars = {"nu_t": per_head("nu_t", nu_t, heads), "tau": per_head("tau", tau, heads)}

    def matched_variance(self, size: int) -> Tensor:
        """The total variance at which a fresh block has the logit range of QK-normed attention."""
        return matched_variance(self.kernel, size, self.scalars["nu_t"], self.scalars["tau"])

    def estimate(self, call: RobustCall, p: dict[str, Tensor], record: Record | None) -> AttentionOutput:
        """Steps 3 to 6 of a call, whose mathematics attention/robust/reference.py writes down."""
        backend = self.block.backend
        for _ in range(self.irls_steps - 1):
            # Appendix E: what the keys agree on takes the query's place.
            of_keys = replace(
                call, v=call.k, radial_mode="off", radial_correlation="qk", dropout=0.0, return_weights=False
            )
            call = replace(call, q=on_sphere(robust_attention(of_keys, backend).v_bar, p["radius"] * 0.5**0.5)[1])
        output = robust_attention(call, backend if record is None else "reference")
        if record is not None:
            record_estimate(record, output)
            if self.kernel == "student_mle":  # the power of its robust weight, nu + 1 in `student`
                record["power"] = torch.ones_like(p["nu_t"])
        return output

    def unused(self) -> set[str]:
        """Each weight has its own number; a Gaussian one asks nothing of q and k."""
        if self.kernel != "gaussian":
            return {"nu_t"} if self.kernel == "exponential" else {"tau"}
        idle = {"nu_t", "tau", "eta_tq", "radius", "norm_scope", "norm_gain", "residual_form", "widen_q"}
        return idle if self.block.rotate_values else idle | {"frequencies"}

    def flops_per_token(self, context: int) -> int:
        """Robust attention, once per reweighting; the last with the radial channel's correlations."""
        parts, heads, size = self.block.parts, self.block.shape.n_head, self.block.rotary_dim
        correlation = parts.radial.radial_correlation if parts.radial.radial != "none" else None
        once = robust_flops(context, heads, size)
        return robust_flops(context, heads, size, correlation) + (self.irls_steps - 1) * once


def record_estimate(record: Record, output: AttentionOutput) -> None:
    """Add weights, evidence, precisions (B or 1, H, T, S) and robust weights of one robust attention to a record."""
    weights = output.weights
    assert weights is not None, "ask robust_attention for its weights"
    record.update(weights=weights.directional, log_evidence=output.log_evidence)
    record.update(log_kappa=weights.log_kappa, log_kappa_tilde=weights.log_kappa_tilde)
    record["robust_weight"] = weights.robust
    if weights.radial is not None:
        record["radial_weights"] = weights.radial
    if weights.gated is not None:
        record["gated_weights"] = weights.gated


def robust_flops(context: int, heads: int, head_dim: int, radial_correlation: str | None = None) -> int:
    """Forward FLOPs per token of the attention itself: scores, logits, aggregation, and the radial channel.

    Of its correlations only `vv` needs products of its own; `qk` sums those of the scores over the heads.
    """
    per_pair = heads * (4 * head_dim + LOGIT_FLOPS)
    if radial_correlation is not None:
        per_pair += LOGIT_FLOPS + {"vv": 2 * heads * head_dim, "qk": heads, "one": 0}[radial_correlation]
    return int(mean_visible(context) * per_pair)
