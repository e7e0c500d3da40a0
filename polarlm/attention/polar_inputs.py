"""Step 1 of Algorithm 1: queries, keys and values on their spheres, and the magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polarlm.attention.content_transport import CommonFrame
from polarlm.attention.mixer import TokenContext, split_heads
from polarlm.attention.projections import sphere_heads
from polarlm.geometry.sphere import on_sphere

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention


class Inputs(NamedTuple):
    """What one layer makes of the stream."""

    x: Tensor  # (B, T, d) the stream as the projections see it
    q: Tensor  # (B, H, T, Dh)
    k: Tensor  # (B, G, T, Dh)
    v: Tensor  # (B, G, T, Dh)
    m: Tensor  # (B, T)


def project_inputs(mixer: PolarAttention, x: Tensor, parameters: dict[str, Tensor], context: TokenContext) -> Inputs:
    """The layer's projections of the stream x (B, T, d)."""
    heads, groups, size = mixer.shape.n_head, mixer.shape.n_kv_head, mixer.rotary_dim
    m = None
    if mixer.norm_position == "post":
        x = parameters["gain"] * x
    elif mixer.norm_position == "pre":  # the sphere is the stream's, and so is the magnitude: m = |z|
        m, x = on_sphere(x, 1.0)
        m = parameters["gain"] * m
    v = mixer.v(x) if mixer.value_residual is None else mixer.value_residual(mixer.v(x), context)
    length, direction = on_sphere(v, 1.0)
    m = length if m is None else m
    v = direction if mixer.norm_values else v
    v, m = split_heads(v, groups), m.squeeze(-1)
    if mixer.qk is None:  # the Gaussian kernel weighs by precision alone: q and k have no say
        return Inputs(x, v.new_zeros(v.shape[0], heads, *v.shape[2:]), torch.zeros_like(v), v, m)

    qk = mixer.qk(x)
    radius = parameters["radius"] * 0.5**0.5  # |q|^2 = s^2 d_h = s^2 Dh/2
    if mixer.norm_position == "pre":
        qk = qk * parameters["radius"].to(qk.dtype)
    elif mixer.norm_scope == "global":
        parts = qk.split([heads * size, groups * size], dim=-1)
        qk = torch.cat([on_sphere(part, radius)[1] for part in parts], dim=-1)
    qk = split_heads(qk, heads + groups)
    if mixer.norm_position != "pre" and mixer.norm_scope == "per_head":
        _, qk = on_sphere(qk, radius)
    q, k = qk.split([heads, groups], dim=1)
    if mixer.q_gain is not None and mixer.k_gain is not None:
        q, k = q * mixer.q_gain.to(q.dtype), k * mixer.k_gain.to(k.dtype)
    return Inputs(x, q, k, v, m)


def turned_inputs(
    mixer: PolarAttention, x: Tensor, parameters: dict[str, Tensor], frame: CommonFrame, context: TokenContext
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """q, k and v in the common frame and the magnitude (B, T), in one go; None where a switch asks for the long way."""
    usual = mixer.norm_position == "both" and mixer.norm_scope == "per_head" and mixer.norm_values
    bare = mixer.q_gain is None and mixer.value_residual is None and mixer.transport is None
    bare = bare and mixer.frequencies.kind == "shared"
    if mixer.qk is None or not (usual and bare and mixer.rotate_values) or context.record is not None:
        return None
    heads, radius = (mixer.shape.n_head, mixer.shape.n_kv_head), parameters["radius"] * 0.5**0.5
    q, k, v, m = sphere_heads(x, mixer.qk, mixer.v, heads, radius, *frame.turns.keys)
    return q, k, v, m.squeeze(-1)
