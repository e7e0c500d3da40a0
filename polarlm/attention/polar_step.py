"""Step 7 of Algorithm 1: from the estimates to the step that the residual stream takes, in latent coordinates.

The state is x = m v with |v| = sqrt(D). To first order its step is m dv + beta dm v with dv = alpha_i Delta tangent
(Section 3.4); alpha_i = alpha/m makes the ambient step alpha Delta, so that confident tokens turn less (Section 3.5).
A retraction takes the step along the sphere instead: x+ - x = (m + beta dm) v+ - m v with |v+| = |v| exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from polarlm.attention.estimator import choice
from polarlm.errors import UserError
from polarlm.geometry.sphere import exp_map, geodesic_step, retract

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

RETRACTIONS = ("none", "norm", "exp", "geodesic")


def check_retraction(kind: str, projection: str, norm_values: bool) -> str:
    """The retraction, checked against the switches it depends on."""
    choice("retract", kind, RETRACTIONS)
    if kind != "none" and not norm_values:
        raise UserError(f"block.retract={kind} moves on the sphere; it needs block.norm_values=true.")
    if kind in ("norm", "exp") and projection == "none":
        raise UserError(f"block.retract={kind} starts from a tangent step; block.projection=none gives none.")
    if kind == "geodesic" and projection != "global":
        raise UserError(
            "block.retract=geodesic walks from the whole direction towards the whole estimate; it needs "
            f"block.projection=global, not {projection}."
        )
    return kind


def gated_mean(v: Tensor, gated_sum: Tensor, gate: Tensor) -> Tensor:
    """v + sum_j A (g v_j - Re g v), (B, T, H, Dh), from sum_j A g v_j and the gate's mean sum_j A Re g (B, T, H).

    For one head, and per head, the tangent step is that of sum_j A g v_j (Appendix G.1): what is taken off lies along
    v, as an imaginary part times v would not. Where several heads share one tangency, a gate's mean below 1 in one of
    them would turn the state between heads with nothing to turn to.
    """
    return gated_sum + (1 - gate).unsqueeze(-1) * v


def takes_tangent_step(mixer: PolarAttention) -> bool:
    """Whether the step is alpha times the projected estimates and beta times the change of magnitude, in R^D."""
    ambient = mixer.retract == "none" and mixer.alpha_over_m and mixer.projector == "real"
    return ambient and mixer.consensus == "none" and mixer.rotate_values and mixer.transport is None


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
