"""Rotation, normalisation and tangent steps, row by row, in as few passes over memory as possible.

Every pass over the activations costs about as much as a twentieth of the block's matrix products, and autograd's own
derivative of these chains makes two to three times as many passes as needed. Same values as `geometry.rotate` and as
the plain formulas of the others, which torch.compile (it fuses them anyway) and learned phases still use. In fp32 on a
CPU native code does each in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.attention.kernels.native_rows import (
    TangentStep,
    across,
    across_backward,
    norm,
    norm_backward,
    sphere,
    sphere_backward,
    takes_rows,
    tangent,
    tangent_backward,
    turn,
)
from polarlm.geometry import project, tangential_part
from polarlm.geometry import rotate as plain_rotate

# Only keeps the zero vector finite: a fresh un-normalised stream is small but meaningful.
SPHERE_EPS = 1e-12


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`geometry.rotate` of x (B, H, T, dim)."""
    if torch.compiler.is_compiling() or cos.requires_grad:
        return plain_rotate(x, cos, sin, inverse)
    if 2 < cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    if not torch.is_grad_enabled() and wide.dim() == 4 and cos.dtype == wide.dtype and takes_rows(wide):
        return turn(wide, cos, sin, inverse).to(x.dtype)  # decoding: autograd's bookkeeping would be most of the work
    return _Rotation.apply(wide, cos, -sin if inverse else sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """The derivative of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if x.dim() == 4 and cos.dtype == x.dtype and takes_rows(x):
            return turn(x, cos, sin, inverse=False)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # the layout that attention wants
        (real, imag), (to_real, to_imag) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.mul(real, cos, out=to_real).addcmul_(imag, sin, value=-1)
        torch.mul(imag, cos, out=to_imag).addcmul_(real, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(gradients[0], cos, -sin), None, None


def tangent_step(
    v: Tensor, v_bar: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, projection: str = "per_head",
    evidence: Tensor | None = None, clamp: float | None = None, change: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """scale project(v, v_bar) + change v of every token, rotated back: (B, T, H, Dh) of v, v_bar (B, H, T, Dh).

    `evidence` (B, H, T) and its `clamp` are the projection's, `change` (B, T) is that of the magnitude. None where it
    takes other ways.
    """
    plain = cos.requires_grad or cos.dim() == 4 or cos.dtype != v.dtype or v_bar.dtype != v.dtype
    plain = plain or v.shape != v_bar.shape or (scale.requires_grad and change is not None)
    if plain or not (takes_rows(v) and takes_rows(v_bar)):
        return None
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    evidence = evidence if projection == "evidence" else None
    fixed = (1.0 if scale.requires_grad else float(scale), projection, -1.0 if clamp is None else clamp)
    step = _Tangent.apply(v, v_bar, evidence, change, fixed, cos, sin).transpose(1, 2)
    return scale * step if scale.requires_grad else step


class _Tangent(torch.autograd.Function):
    """Keeps its inputs alone, which the attention before it keeps as well."""

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        v_bar: Tensor,
        evidence: Tensor | None,
        change: Tensor | None,
        fixed: tuple[float, str, float],
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(v, v_bar, evidence, change, cos, sin)
        ctx.fixed = fixed
        out = rows_like(v)
        tangent(v, v_bar, TangentStep(*fixed, evidence, change), cos, sin, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        v, v_bar, evidence, change, cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():
            scale, mode, clamp = ctx.fixed

            def plain(v: Tensor, v_bar: Tensor, *given: Tensor) -> Tensor:
                known = given[0].transpose(1, 2) if evidence is not None else None
                step = project(v.transpose(1, 2), v_bar.transpose(1, 2), known, mode, None if clamp < 0 else clamp)
                step = scale * step.transpose(1, 2)
                step = step if change is None else step + given[-1][:, None, :, None] * v
                return plain_rotate(step, cos, sin, inverse=True)

            again = iter(
                by_plain_formula(plain, tuple(x for x in (v, v_bar, evidence, change) if x is not None), gradients)
            )
            made = tuple(None if x is None else next(again) for x in (v, v_bar, evidence, change))
        else:
            step = TangentStep(*ctx.fixed)._replace(evidence=evidence, change=change)
            made = tangent_backward(v, v_bar, step, cos, sin, gradients[0])
        return *made, None, None, None


def add_across(x: Tensor, step: Tensor) -> Tensor:
    """x + P_T(x) step of the last axis: the stream x (B, T, d) takes no more of a step than is orthogonal to it."""
    if x.dtype == step.dtype and x.shape == step.shape and takes_rows(x) and takes_rows(step):
        return _Across.apply(x, step)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x + tangential_part(x.to(wide), step.to(wide)).to(step.dtype)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return across(x, step)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return by_plain_formula(lambda x, step: x + tangential_part(x, step), ctx.saved_tensors, gradients)
        x, step = ctx.saved_tensors
        return across_backward(x, step, gradients[0])


def on_sphere(x: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """RMS magnitude (..., 1) of the last axis, and x at per-channel RMS `radius`; fp32 or better inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        rms = rms_of(wide)
        return rms, (wide * (radius / rms)).to(x.dtype)
    if not torch.is_grad_enabled() and takes_rows(wide):
        rms, direction = sphere(wide, float(radius), SPHERE_EPS)
        return rms, direction.to(x.dtype)
    rms, direction = _Sphere.apply(wide, torch.as_tensor(radius, dtype=wide.dtype, device=x.device))
    return rms, direction.to(x.dtype)


def rms_of(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + SPHERE_EPS).sqrt()


class _Sphere(torch.autograd.Function):
    """With s = radius/rms: y = s x, so dx = s ∂y + x (∂rms − s ⟨∂y, x⟩/rms)/(n rms)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        if takes_rows(x):
            rms, y = sphere(x, float(radius), SPHERE_EPS)
        else:
            rms = rms_of(x)
            y = x * (radius / rms)
        ctx.save_for_backward(x, radius, rms)
        return rms, y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (d_rms, d_y), (x, radius, rms) = gradients, ctx.saved_tensors
        if takes_rows(x) and not torch.is_grad_enabled():  # enabled: somebody wants to differentiate this again
            dx, d_radius = sphere_backward(x, float(radius), rms, d_rms, d_y)
            return dx, d_radius if ctx.needs_input_grad[1] else None
        along = torch.linalg.vecdot(d_y, x).unsqueeze(-1)
        scale = radius / rms
        dx = torch.addcmul(d_y * scale, x, (d_rms - scale * along / rms) / (x.shape[-1] * rms))
        return dx, (along / rms).sum() if ctx.needs_input_grad[1] else None


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x·gain/rms(x) over the last axis, in x's precision."""
    if x.dim() != 3 or gain.dtype != x.dtype or not takes_rows(x):
        return F.rms_norm(x, gain.shape, gain, eps)
    return _Norm.apply(x, gain, eps) if torch.is_grad_enabled() else norm(x, gain, eps)[1]


class _Norm(torch.autograd.Function):
    """With g = gain ∂y: dx = (g − x ⟨g, x⟩/(n rms²))/rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rms, y = norm(x, gain, eps)
        ctx.save_for_backward(x, gain, rms)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (d_y,), (x, gain, rms) = gradients, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *norm_backward(x, gain, rms, d_y), None
        scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()  # again: this derivative is differentiated
        inner = torch.linalg.vecdot(d_y * gain, x).unsqueeze(-1) * scale.square() / x.shape[-1]
        return (d_y * gain - x * inner) * scale, (d_y * x * scale).sum((0, 1)), None


def rows_like(x: Tensor) -> Tensor:
    """Unwritten, of the shape of x (B, H, T, Dh), with a token's heads side by side."""
    batch, heads, tokens, size = x.shape
    return x.new_empty(batch, tokens, heads, size).transpose(1, 2)


def by_plain_formula(
    plain: Callable[..., Any], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients by the plain formula, for somebody who wants to differentiate them again."""
    # One may have been made from another: how is not this node's business.
    inputs = tuple(x.view_as(x) for x in inputs)
    asked = [x for x in inputs if x.requires_grad]
    given = iter(torch.autograd.grad(plain(*inputs), asked, gradients, create_graph=True))
    return tuple(next(given) if x.requires_grad else None for x in inputs)
