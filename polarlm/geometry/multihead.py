"""Tangent updates with several heads (Appendix D): one sphere, H blocks of it, one constraint.

The direction v (..., H, Dh) lives on one sphere of radius r = ||v||; heads are blocks with r^2 = sum_h r_h^2.
Each head estimates its block with its own evidence P_h, but tangency <v, Delta> = 0 binds them together.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polarlm.geometry.sphere import Field
from polarlm.geometry.transport import rotate, to_complex, to_real
from polarlm.operations import operation

Projection = Literal["none", "per_head", "global", "evidence"]
PROJECTIONS: tuple[str, ...] = ("none", "per_head", "global", "evidence")


def project(
    v: Tensor,
    v_bar: Tensor,
    log_evidence: Tensor | None = None,
    mode: Projection = "evidence",
    clamp: float | None = None,
    field: Field = "real",
) -> Tensor:
    """The directional update of every head: v, v_bar (..., H, Dh), log_evidence (..., H), result (..., H, Dh).

    `clamp` bounds the spread of the log evidence over the heads, see `project_evidence`. The constraint is <v, D> = 0;
    field="complex" asks for v^dagger D = 0, which removes two real dimensions (docs/theory.md E7).
    """
    if mode == "none":
        return v_bar
    if field == "complex":
        return to_real(project(to_complex(v), to_complex(v_bar), log_evidence, mode, clamp))
    if mode == "per_head":
        return project_per_head(v, v_bar)
    if mode == "global":
        return project_global(v, v_bar)
    if mode == "evidence":
        if log_evidence is None:
            raise ValueError("projection mode 'evidence' needs log_evidence (..., H); got None")
        return project_evidence(v, v_bar, log_evidence, clamp)
    raise ValueError(f"unknown projection mode {mode!r}; choose one of {', '.join(PROJECTIONS)}")


@operation
def tangent_step(
    v: Tensor, v_bar: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, projection: Projection = "per_head",
    evidence: Tensor | None = None, clamp: float | None = None, change: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """scale project(v, v_bar) + change v of every token, rotated back: (B, T, H, Dh).

    v (B, G, T, Dh) and v_bar (B, H, T, Dh) are in the common frame, a value head stands for each of its query heads;
    `evidence` (B, H, T) and its `clamp` are the projection's, `change` (B, T) is that of the magnitude.
    """
    wide, group = torch.promote_types(v.dtype, torch.float32), v_bar.shape[1] // v.shape[1]
    own = (v if group == 1 else v.repeat_interleave(group, dim=1)).transpose(1, 2).to(wide)
    log_evidence = None if evidence is None else evidence.transpose(1, 2)
    step = scale * project(own, v_bar.transpose(1, 2).to(wide), log_evidence, projection, clamp)
    if change is not None:
        step = step + change[..., None, None] * own
    return rotate(step.transpose(1, 2), cos, sin, inverse=True).transpose(1, 2)


def project_per_head(v: Tensor, v_bar: Tensor) -> Tensor:
    """XSA: every head's v_bar_h without its component along v_h."""
    return torch.addcmul(v_bar, v, _dot(v, v_bar) / _floor(_dot(v, v).real), value=-1)


def project_global(v: Tensor, v_bar: Tensor) -> Tensor:
    """P_T(v) v_bar with the whole vector: one component removed over all heads together (Eq. rt_transformer_update)."""
    along = _dot(v, v_bar).sum(-2, keepdim=True)
    squared_radius = _dot(v, v).real.sum(-2, keepdim=True)
    return torch.addcmul(v_bar, v, along / _floor(squared_radius), value=-1)


def project_evidence(v: Tensor, v_bar: Tensor, log_evidence: Tensor, clamp: float | None = None) -> Tensor:
    """Proposition 5: the evidence-weighted coupled tangent update.

    Minimises sum_h P_h ||Delta_h - delta_h||^2 subject to sum_h <v_h, Delta_h> = 0, with delta = v_bar - v:
    Delta_h = delta_h - <v, delta> (1/P_h) / (sum_h' r_h'^2 / P_h') v_h. Heads with little evidence pay for tangency.

    A small head (r_h << r) without evidence would pay all of it with a step of <v, delta>/r_h. `clamp` (nats) lets no
    head's log evidence fall further than that below the largest; then no step exceeds e^(clamp/2) <v, delta>/2r.
    """
    if clamp is not None:
        log_evidence = torch.maximum(log_evidence, log_evidence.amax(-1, keepdim=True) - clamp)
    squared_radius = _dot(v, v).real
    # delta, not v_bar: the two differ as soon as heads differ in evidence (test H5).
    along = (_dot(v, v_bar) - squared_radius).sum(-2, keepdim=True)
    shares = correction_shares(squared_radius.squeeze(-1), log_evidence).unsqueeze(-1)
    return torch.addcmul(v_bar, v, 1 + along * shares / _floor(squared_radius), value=-1)  # delta is never formed


def correction_shares(squared_radius: Tensor, log_evidence: Tensor) -> Tensor:
    """How much of <v, delta> each head gives up: (r_h^2/P_h) / sum_h' r_h'^2/P_h' (..., H), summing to one.

    A softmax, so only differences of log evidence matter and no evidence is too large or too small.
    """
    floored = _floor(squared_radius)
    logits = floored.log() - log_evidence
    # A head with nothing in it cannot contribute to <v, Delta>, however little evidence it has.
    logits = logits.masked_fill(squared_radius < floored, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, dim=-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b).unsqueeze(-1)  # a^dagger b of complex vectors


def _floor(squared_norm: Tensor) -> Tensor:
    # A zero vector has no direction to remove: keep 0/0 from becoming NaN (and its gradient too).
    return squared_norm.clamp_min(torch.finfo(squared_norm.dtype).tiny ** 0.5)
