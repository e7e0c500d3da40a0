"""Rotation, spheres and tangent steps by native passes: what the filtering blocks do around robust attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention.projections import sphere_heads
from polarlm.geometry.multihead import PROJECTIONS, Projection, tangent_step
from polarlm.geometry.sphere import SPHERE_EPS, add_tangential, on_sphere
from polarlm.geometry.transport import rotate
from polarlm.operations import faster, plain

from .operator import dense_channels
from .passes import (
    by_head,
    by_matrix,
    matrix_product,
    matrix_product_backward,
    node,
    run_pass,
    takes_pass,
    takes_products,
    takes_tables,
)


@faster(rotate)
def rotate_natively(otherwise: Callable, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """In one pass, whose derivative is the rotation back."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    if cos.requires_grad or wide.dim() != 4 or cos.dtype != wide.dtype or not takes_pass(wide):
        return otherwise(x, cos, sin, inverse)
    rotation = _Rotation.apply if torch.is_grad_enabled() else turn
    return rotation(wide, by_head(cos), by_head(sin), -1.0 if inverse else 1.0).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """x (B,H,T,D) rotated by tables that broadcast to (B,H,T,D/2)."""
    x = dense_channels(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)  # the layout that attention wants
    run_pass("rotate", x, sign, y=out, cos=cos, sin=sin)
    return out


class _Rotation(torch.autograd.Function):
    """Keeps the tables alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return turn(x, cos, sin, sign)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotation.apply(gradients[0], *ctx.saved_tensors, -ctx.sign), None, None, None


@faster(on_sphere)
def on_sphere_natively(otherwise: Callable, x: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """With s = radius/rms: y = s x, so dx = s ∂y + x (∂rms − s ⟨∂y, x⟩/rms)/(n rms)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not takes_pass(wide):
        return otherwise(x, radius)
    if torch.is_grad_enabled():
        rms, direction = _sphere(wide, torch.as_tensor(radius, dtype=wide.dtype, device=x.device))
    else:
        (rms, direction), _ = _sphere_forward(wide, radius)
    return rms, direction.to(x.dtype)


def _sphere_forward(x: Tensor, radius: Tensor | float, out: Tensor | None = None) -> Any:
    x = dense_channels(x)
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x) if out is None else out
    run_pass("sphere", x, float(radius), SPHERE_EPS, y=y, rms=rms)
    return (rms, y), [rms]


def _sphere_backward(
    arguments: list[Any], kept: list[Tensor], gradients: tuple[Tensor, ...], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    x, d_y = dense_channels(arguments[0]), dense_channels(gradients[1])
    d_x, d_radius = torch.empty_like(x), torch.empty((), dtype=torch.float64)
    run_pass(
        "sphere_backward", x, float(arguments[1]), total=d_radius, rms=kept[0], d_rms=gradients[0], d_y=d_y, d_x=d_x
    )
    return d_x, d_radius.to(x.dtype) if needed[1] else None


_sphere = node(plain(on_sphere), _sphere_forward, _sphere_backward)


@faster(add_tangential)
def add_tangential_natively(otherwise: Callable, x: Tensor, step: Tensor) -> Tensor:
    """In one pass each way."""
    if x.dtype != step.dtype or x.shape != step.shape or not (takes_pass(x) and takes_pass(step)):
        return otherwise(x, step)
    return _across(x, step)


def _across_forward(x: Tensor, step: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, step = dense_channels(x), dense_channels(step)
    y = torch.empty_like(x)
    run_pass("across", x, y=y, other=step)
    return y, []


def _across_backward(arguments: list[Any], _: list[Tensor], gradients: tuple[Tensor, ...], needed: Any) -> tuple:
    x, step, d_y = (dense_channels(tensor) for tensor in (*arguments, gradients[0]))
    d_x, d_step = torch.empty_like(x), torch.empty_like(step)
    run_pass("across_backward", x, other=step, d_y=d_y, d_x=d_x, d_other=d_step)
    return d_x, d_step


_across = node(plain(add_tangential), _across_forward, _across_backward)


@faster(tangent_step)
def tangent_step_natively(
    otherwise: Callable, v: Tensor, v_bar: Tensor, scale: Tensor,
    cos: Tensor, sin: Tensor, projection: Projection = "per_head",
    evidence: Tensor | None = None, clamp: float | None = None, change: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """In one pass each way, which keeps only what the attention before it keeps as well."""
    usual = takes_tables(cos, v) and v_bar.dtype == v.dtype and v.shape == v_bar.shape
    learned = scale.requires_grad  # then multiplied outside, which a change along v must not be
    if not usual or (learned and change is not None) or not (takes_pass(v) and takes_pass(v_bar)):
        return otherwise(v, v_bar, scale, cos, sin, projection, evidence, clamp, change)
    evidence = evidence if projection == "evidence" else None
    fixed = 1.0 if learned else float(scale)
    step = _tangent(v, v_bar, evidence, change, by_head(cos), by_head(sin), fixed, projection, clamp).transpose(1, 2)
    return scale * step if learned else step


def _run_tangent(
    name: str, v: Tensor, v_bar: Tensor, evidence: Tensor | None, change: Tensor | None, scale: float,
    projection: str, clamp: float | None, **operands: Tensor | None,
) -> None:  # fmt: skip
    operands |= {"evidence": column(evidence), "change": column(change)}
    least = -1.0 if clamp is None else clamp
    run_pass(name, v_bar, scale, least, None, PROJECTIONS.index(projection), None, other=v, **operands)


def column(x: Tensor | None) -> Tensor | None:
    """One number for every row."""
    return None if x is None else x.unsqueeze(-1)


def _tangent_forward(
    v: Tensor, v_bar: Tensor, evidence: Tensor | None, change: Tensor | None, cos: Tensor, sin: Tensor, *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    out = rows_like(v)
    _run_tangent("tangent", v, v_bar, evidence, change, *rest, y=out, cos=cos, sin=sin)
    return out, []


def _tangent_backward(
    arguments: list[Any], _: list[Tensor], gradients: tuple[Tensor, ...], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    v, v_bar, evidence, change, cos, sin, *rest = arguments
    d_v, d_v_bar, d_y = torch.empty_like(v), torch.empty_like(v_bar), dense_channels(gradients[0])
    d_evidence, d_change = (None if x is None else torch.empty_like(x) for x in (evidence, change))
    _run_tangent(
        "tangent_backward", v, v_bar, evidence, change, *rest, cos=cos, sin=sin, d_y=d_y, d_x=d_v_bar, d_other=d_v,
        d_evidence=column(d_evidence), d_change=column(d_change),
    )  # fmt: skip
    return d_v, d_v_bar, d_evidence, d_change


def _tangent_formula(
    v: Tensor, v_bar: Tensor, evidence: Tensor | None, change: Tensor | None, cos: Tensor, sin: Tensor,
    scale: float, projection: Projection, clamp: float | None,
) -> Tensor:  # fmt: skip
    factor = torch.tensor(scale)
    return plain(tangent_step)(v, v_bar, factor, cos, sin, projection, evidence, clamp, change).transpose(1, 2)


_tangent = node(_tangent_formula, _tangent_forward, _tangent_backward)


@faster(sphere_heads)
def sphere_heads_natively(
    otherwise: Callable,
    x: Tensor,
    qk: nn.Linear,
    v: nn.Linear,
    heads: tuple[int, int],
    radius: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In the memory of the projections, which are recomputed from the outputs and so are not saved."""
    if not takes_tables(cos, x) or not takes_products(x, qk, v):
        return otherwise(x, qk, v, heads, radius, cos, sin)
    return _sphere_heads(x, qk.weight, v.weight, radius, heads, by_head(cos), by_head(sin))


def _sphere_heads_forward(
    x: Tensor, w_qk: Tensor, w_v: Tensor, radius: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor
) -> Any:
    q_k = matrix_product(x, w_qk).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
    (rms, _), _ = _sphere_forward(q_k, radius, out=q_k)
    flat = matrix_product(x, w_v)
    (m, _), _ = _sphere_forward(flat, 1.0, out=flat)
    v = flat.unflatten(-1, (heads[1], -1)).transpose(1, 2)
    for part in (q_k, v):
        run_pass("rotate", part, y=part, cos=cos, sin=sin)
    return (*q_k.split(heads, dim=1), v, m), [q_k, rms, v, m]


def _sphere_heads_backward(
    arguments: list[Any], kept: list[Tensor], gradients: tuple[Tensor, ...], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    (x, w_qk, w_v, radius, heads, cos, sin), (q_k, rms, v, m) = arguments, kept
    *d_parts, d_v_turned, d_m = gradients
    d_radius, before_qk, before_v = torch.zeros_like(radius), rows_like(q_k), rows_like(v)
    for d_y, y, scale, d_x in zip(d_parts, *(part.split(heads, dim=1) for part in (q_k, rms, before_qk))):
        d_radius += _turned_sphere_backward(y, float(radius), scale, None, d_y, cos, sin, d_x)
    _turned_sphere_backward(v, 1.0, m, d_m, d_v_turned, cos, sin, before_v)
    d_qk, d_v = (part.transpose(1, 2).flatten(-2) for part in (before_qk, before_v))
    d_x, d_w_qk = matrix_product_backward(x, w_qk, d_qk, needed)
    more, d_w_v = matrix_product_backward(x, w_v, d_v, (needed[0], needed[2]))
    d_x = None if d_x is None or more is None else d_x.add_(more)
    return d_x, d_w_qk, d_w_v, d_radius if needed[3] else None


def _turned_sphere_backward(
    y: Tensor, radius: float, rms: Tensor, d_rms: Tensor | None, d_y: Tensor, cos: Tensor, sin: Tensor, out: Tensor
) -> Tensor:
    """Gradient of x, into `out`, where y (B,H,T,D) is x·radius/rms turned; returns that of the radius.

    With rms (B,T,1) one RMS holds for all heads, with (B,H,T,1) each head has its own.
    """
    d_y, d_radius = dense_channels(d_y), torch.empty((), dtype=torch.float64)
    run_pass(
        "turned_sphere_backward", y, radius, mode=int(rms.dim() == 3), total=d_radius,
        rms=rms, d_rms=d_rms, d_y=d_y, cos=cos, sin=sin, d_x=out,
    )  # fmt: skip
    return d_radius.to(y.dtype)


_sphere_heads = node(
    lambda x, w_qk, w_v, radius, heads, cos, sin: plain(sphere_heads)(
        x,
        by_matrix(w_qk),
        by_matrix(w_v),
        heads,
        radius,
        cos,
        sin,
    ),
    _sphere_heads_forward,
    _sphere_heads_backward,
)


def rows_like(x: Tensor) -> Tensor:
    """Unwritten, of the shape of x (B, H, T, Dh), with a token's heads side by side."""
    batch, heads, tokens, size = x.shape
    return x.new_empty(batch, tokens, heads, size).transpose(1, 2)
