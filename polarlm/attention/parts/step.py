"""Step 7 of Algorithm 1: from the estimates to the step that the residual stream takes, in latent coordinates.

The state is x = m v with |v| = sqrt(D). To first order its step is m dv + beta dm v with dv = alpha_i Delta tangent
(Section 3.4); alpha_i = alpha/m makes the ambient step alpha Delta, so that confident tokens turn less (Section 3.5).
A retraction takes the step along the sphere instead: x+ - x = (m + beta dm) v+ - m v with |v+| = |v| exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from polarlm.attention.estimator import choice, scalar
from polarlm.attention.mixer import Record
from polarlm.attention.parts.inputs import Latent
from polarlm.attention.parts.part import Part
from polarlm.attention.parts.precision import Prior
from polarlm.attention.robust import AttentionOutput
from polarlm.errors import UserError
from polarlm.geometry import project
from polarlm.geometry.multihead import PROJECTIONS, Projection, tangent_step
from polarlm.geometry.sphere import Field, exp_map, geodesic_step, retract

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

RETRACTIONS = ("none", "norm", "exp", "geodesic")


class PolarStep(Part):
    """alpha times the tangential part of the estimate; `retract` bends it back to the sphere."""

    def __init__(
        self,
        block: PolarAttention,
        *,
        projection: str,
        projector: str,
        evidence_clamp: float | None,
        alpha_over_m: bool,
        retract: str,
        alpha: float,
    ) -> None:
        super().__init__(block)
        self.projection = cast(Projection, choice("projection", projection, PROJECTIONS))
        self.projector = cast(Field, choice("projector", projector, ("real", "complex")))
        self.retract = choice("retract", retract, RETRACTIONS)
        self.alpha_over_m, self.alpha = alpha_over_m, alpha
        self.evidence_clamp = limit("evidence_clamp", evidence_clamp)
        self.scalars = {"alpha": scalar("alpha", alpha)}

    def __call__(
        self,
        latent: Latent,
        output: AttentionOutput,
        p: dict[str, Tensor],
        prior: Prior | None,
        record: Record | None,
    ) -> Tensor:
        """The step (B, T, H, Dh), which alone leaves the common frame.

        Nothing else depends on the frame: inner products within a head, and sums of vectors of one head.
        """
        own, m, frame = latent.v, latent.m, latent.frame
        if record is None and prior is None and self._usual:
            change = None if output.m_bar is None else p["beta"] * (output.m_bar - m)
            (cos, sin), evidence = frame.turns.queries, output.log_evidence
            clamp = self.evidence_clamp
            return tangent_step(own, output.v_bar, p["alpha"], cos, sin, self.projection, evidence, clamp, change)
        # Grouped value heads stand for each of their query heads (B, T, H, Dh).
        v_bar, wide = output.v_bar, torch.promote_types(own.dtype, torch.float32)
        group = v_bar.shape[1] // own.shape[1]
        own = (own if group == 1 else own.repeat_interleave(group, dim=1)).transpose(1, 2).to(wide)
        mean, log_evidence = v_bar.transpose(1, 2).to(wide), output.log_evidence.transpose(1, 2)
        if output.gate is not None:
            mean = gated_mean(own, mean, output.gate.transpose(1, 2))
            v_bar = mean.transpose(1, 2)
        if prior is not None:
            mean, log_evidence = prior.fuse(own, mean, log_evidence)
        tangent = project(own, mean, log_evidence, self.projection, self.evidence_clamp, self.projector)
        step = directional = directional_step(
            own, mean, tangent, m, p["alpha"], alpha_over_m=self.alpha_over_m, retraction=self.retract
        )
        if output.m_bar is not None:
            delta_m = output.m_bar - m
            step = directional + radial_step(own, m, directional, p["beta"] * delta_m, retraction=self.retract)
        leave = frame.leave if self.block.rotate_values else lambda x: x
        if record is not None:
            record.update(v_bar=leave(v_bar), update=leave(directional.transpose(1, 2)))
            if output.m_bar is not None:
                record["delta_m"] = delta_m
        return leave(step.transpose(1, 2)).transpose(1, 2)

    @property
    def _usual(self) -> bool:
        """Whether the step is alpha times the projected estimates and beta times the change of magnitude, in R^D."""
        parts = self.block.parts
        ambient = self.retract == "none" and self.alpha_over_m and self.projector == "real"
        rotary = parts.transport.rotate_values and self.block.transport is None
        return ambient and parts.aggregate.consensus == "none" and rotary

    def unused(self) -> set[str]:
        """A projector needs a projection, and a bound on evidence one that weighs by it."""
        idle = {"projector"} if self.projection == "none" else set()
        return idle | ({"evidence_clamp"} if self.projection != "evidence" else set())


def limit(name: str, value: Any) -> float | None:
    """A number that is not negative, or None where there is no limit."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise UserError(f"block.{name} is {value!r}; it must be a number of at least 0, or null for no limit.")
    return value


def gated_mean(v: Tensor, gated_sum: Tensor, gate: Tensor) -> Tensor:
    """v + sum_j A (g v_j - Re g v), (B, T, H, Dh), from sum_j A g v_j and the gate's mean sum_j A Re g (B, T, H).

    For one head, and per head, the tangent step is that of sum_j A g v_j (Appendix G.1): what is taken off lies along
    v, as an imaginary part times v would not. Where several heads share one tangency, a gate's mean below 1 in one of
    them would turn the state between heads with nothing to turn to.
    """
    return gated_sum + (1 - gate).unsqueeze(-1) * v


def directional_step(
    v: Tensor, v_bar: Tensor, tangent: Tensor, m: Tensor, alpha: Tensor, *, alpha_over_m: bool, retraction: str
) -> Tensor:
    """The step that turning the direction brings, (B, T, H, Dh), from v, v_bar and the tangent update of that shape."""
    if retraction == "none":
        return alpha * tangent if alpha_over_m else alpha * m[..., None, None] * tangent
    m = m[..., None]
    angular = alpha / m if alpha_over_m else alpha
    point, consensus, update = (x.flatten(-2) for x in (v, v_bar, tangent))  # (B, T, D): one sphere for all heads
    if retraction == "geodesic":
        turned = geodesic_step(point, consensus, angular)
    elif retraction == "exp":
        turned = exp_map(point, angular * update)
    else:
        turned = retract(point, angular * update)
    return (m * (turned - point)).unflatten(-1, v.shape[-2:])


def radial_step(v: Tensor, m: Tensor, directional: Tensor, change: Tensor, *, retraction: str) -> Tensor:
    """The step that a change of magnitude (B, T) brings: along v, or along the direction that v has been turned to."""
    change = change[..., None, None]
    if retraction == "none":
        return change * v
    return change * (v + directional / m[..., None, None])
