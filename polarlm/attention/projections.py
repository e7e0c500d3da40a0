"""From the residual stream to heads: queries, keys and values in the layout of attention."""

from __future__ import annotations

from torch import Tensor, nn

from polarlm.geometry.sphere import on_sphere
from polarlm.geometry.transport import rotate
from polarlm.operations import operation


@operation
def rotated_heads(
    x: Tensor, layer: nn.Linear, heads: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated, and v, each (B, heads, T, Dh), of the projection of x (B, T, d)."""
    q, k, v = layer(x).unflatten(-1, (sum(heads), -1)).transpose(1, 2).split(heads, dim=1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


@operation
def sphere_heads(
    x: Tensor, qk: nn.Linear, v: nn.Linear, heads: tuple[int, int], radius: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k (B, heads, T, Dh) on spheres and rotated, v too, and v's RMS (B, T, 1).

    They are projections of x (B, T, d), q and k at RMS `radius` in every head, v at RMS 1 over all of them.
    """
    _, q_k = on_sphere(qk(x).unflatten(-1, (sum(heads), -1)).transpose(1, 2), radius)
    m, direction = on_sphere(v(x), 1.0)
    turned = rotate(direction.unflatten(-1, (heads[1], -1)).transpose(1, 2), cos, sin)
    q, k = q_k.split(heads, dim=1)
    return rotate(q, cos, sin), rotate(k, cos, sin), turned, m
