"""Polar coordinates of a state: x = m * v, magnitude times direction (Section 3.1 and 3.5).

Units. By default the direction sits at radius sqrt(D) and the magnitude is the RMS of x, as RMSNorm has it; then the
embedding F(m, v) = m*v needs no 1/r anywhere and Algorithm 1's factor-free update is its exact differential.
radius=1 gives the paper's Section 3 units: m = ||x||, unit directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
