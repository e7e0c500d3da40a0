"""The sphere of directions: projectors, exponential and logarithm, geodesics, mean resultant length.

Every function takes points u (..., D) of any radius ||u|| > 0 and divides by ||u||^2 where the paper, written for unit
vectors, does not. The inner product is the real one, <a, b> = Re a^dagger b = dot product in R^D, so the sphere is
S^{D-1} and its tangent space misses exactly one real dimension. field="complex" removes the whole complex line u
(two real dimensions): it is what u u^dagger literally says, kept for the tests that show why it is the wrong one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from polarlm.geometry.transport import to_complex, to_real
from polarlm.operations import operation

Field = Literal["real", "complex"]
# Only keeps the zero vector finite: a fresh un-normalised stream is small but meaningful.
SPHERE_EPS = 1e-12


def radial_part(u: Tensor, x: Tensor, field: Field = "real") -> Tensor:
    """P_R(u) x: the component of x along u."""
    if field == "complex":
        modes = to_complex(u)
        along = (modes.conj() * to_complex(x)).sum(-1, keepdim=True)
        return to_real(modes * along / _squared_norm(u))
    return u * ((u * x).sum(-1, keepdim=True) / _squared_norm(u))


def tangential_part(u: Tensor, x: Tensor, field: Field = "real") -> Tensor:
    """P_T(u) x = x - P_R(u) x: the component of x orthogonal to u."""
    return x - radial_part(u, x, field)


def radial_projector(u: Tensor, field: Field = "real") -> Tensor:
    """P_R(u) as a real matrix (..., D, D)."""
    identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    columns = radial_part(u.unsqueeze(-2), identity, field)  # row k is P_R e_k; P_R is symmetric
    return columns.transpose(-1, -2)


def tangential_projector(u: Tensor, field: Field = "real") -> Tensor:
    """P_T(u) = I - P_R(u) as a real matrix (..., D, D)."""
    return torch.eye(u.shape[-1], dtype=u.dtype, device=u.device) - radial_projector(u, field)


def normalise(x: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Norm(x): the nearest point of the sphere of the given radius."""
    return x * (radius / _norm(x))


@operation
def on_sphere(x: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """RMS magnitude (..., 1) of the last axis, and x at per-channel RMS `radius`; fp32 or better inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rms = (wide.square().mean(-1, keepdim=True) + SPHERE_EPS).sqrt()
    return rms, (wide * (radius / rms)).to(x.dtype)


@operation
def add_tangential(x: Tensor, step: Tensor) -> Tensor:
    """x + P_T(x) step: the stream takes no more of a step than is orthogonal to it; fp32 or better inside."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x + tangential_part(x.to(wide), step.to(wide)).to(step.dtype)


def retract(u: Tensor, step: Tensor) -> Tensor:
    """Norm(u + step) at u's own radius: the second-order retraction that RMSNorm performs after a residual step."""
    return normalise(u + step, _norm(u))


def exp_map(u: Tensor, step: Tensor) -> Tensor:
    """Exp_u(step): walk the great circle from u in the tangent direction `step`, arc length ||step||."""
    radius, length = _norm(u), torch.linalg.vector_norm(step, dim=-1, keepdim=True)
    angle = length / radius
    # sin(angle)/length -> 1/radius as length -> 0; sinc is smooth there (torch.sinc(x) = sin(pi x)/(pi x)).
    return u * angle.cos() + step * torch.sinc(angle / torch.pi)


def log_map(u: Tensor, target: Tensor) -> Tensor:
    """Log_u(target): the tangent vector at u that walks to the direction of `target` (its length is ignored)."""
    tangent = tangential_part(u, target)
    length = torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)
    along = (u * target).sum(-1, keepdim=True) / _norm(u)
    angle = torch.atan2(length, along)
    # angle/length -> 1/along where target already points along u; written so, value and gradient are right at u itself.
    tiny = torch.finfo(u.dtype).tiny
    near = (length <= torch.finfo(u.dtype).eps * along) & (along > 0)
    per_length = torch.where(near, 1.0 / torch.where(near, along, 1.0), angle / length.clamp_min(tiny))
    return tangent * per_length * _norm(u)


def angle_between(u: Tensor, x: Tensor) -> Tensor:
    """The angle in [0, pi] between u and x, by atan2: accurate where acos has lost half its digits."""
    tangent = torch.linalg.vector_norm(tangential_part(u, x), dim=-1)
    along = (u * x).sum(-1) / _norm(u).squeeze(-1)
    return torch.atan2(tangent, along)


def geodesic_step(u: Tensor, mean: Tensor, alpha: float | Tensor = 1.0) -> Tensor:
    """Exp_u(alpha * ||u_bar|| * Log_u(u_bar)): the exact geodesic update; diffuse evidence takes a shorter step."""
    concentration = (torch.linalg.vector_norm(mean, dim=-1, keepdim=True) / _norm(u)).clamp_max(1.0)
    return exp_map(u, alpha * concentration * log_map(u, mean))


def slerp(u: Tensor, target: Tensor, fraction: float | Tensor) -> Tensor:
    """Spherical linear interpolation from u (fraction 0) to the direction of target (1) at u's radius."""
    end = normalise(target, _norm(u))
    angle = angle_between(u, end).unsqueeze(-1)
    sine = angle.sin()
    close = sine.abs() < 1e-6  # weights below are 0/0 there; the chord is the arc to second order
    safe = torch.where(close, torch.ones_like(sine), sine)
    arc = ((1 - fraction) * angle).sin() / safe * u + (fraction * angle).sin() / safe * end
    return torch.where(close, retract(u, fraction * (end - u)), arc)


def mean_direction(weights: Tensor, directions: Tensor) -> Tensor:
    """u_bar = sum_j A_j u_j for weights (..., S) that sum to one and directions (..., S, D)."""
    return (weights.unsqueeze(-2) @ directions).squeeze(-2)


def mean_resultant_length(mean: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """||u_bar|| / radius in [0, 1]: 1 when every direction agrees, 0 when they cancel."""
    return torch.linalg.vector_norm(mean, dim=-1) / radius


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def _squared_norm(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


# Polar coordinates of a state: x = m * v, magnitude times direction (Section 3.1 and 3.5).
#
# Units. By default the direction sits at radius sqrt(D) and the magnitude is the RMS of x, as RMSNorm has it; then the
# embedding F(m, v) = m*v needs no 1/r anywhere and Algorithm 1's factor-free update is its exact differential.
# radius=1 gives the paper's Section 3 units: m = ||x||, unit directions.


def to_polar(x: Tensor, radius: float | None = None) -> tuple[Tensor, Tensor]:
    """Magnitude (...,) and direction (..., D) of x (..., D) with x = m * v and ||v|| = radius (sqrt(D) if None)."""
    radius = math.sqrt(x.shape[-1]) if radius is None else radius
    norm = torch.linalg.vector_norm(x, dim=-1)
    # The zero vector has no direction; it gets v = 0 and m = 0, which still multiply back to x.
    direction = x * (radius / norm.clamp_min(torch.finfo(x.dtype).tiny)).unsqueeze(-1)
    return norm / radius, direction


def from_polar(magnitude: Tensor, direction: Tensor) -> Tensor:
    """The polar embedding F(m, v) = m * v."""
    return magnitude.unsqueeze(-1) * direction


def polar_differential(magnitude: Tensor, direction: Tensor, d_magnitude: Tensor, d_direction: Tensor) -> Tensor:
    """The differential of the embedding: dx = v dm + m dv; maps radial and tangent corrections into ambient space."""
    return direction * d_magnitude.unsqueeze(-1) + magnitude.unsqueeze(-1) * d_direction


def polar_update(
    magnitude: Tensor,
    direction: Tensor,
    d_magnitude: Tensor,
    d_direction: Tensor,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
) -> Tensor:
    """First-order RT-Filter update x+ = x + alpha*m*dv + beta*dm*v (Section 3.4, "Filtering Update")."""
    step = polar_differential(magnitude, direction, beta * d_magnitude, alpha * d_direction)
    return from_polar(magnitude, direction) + step
