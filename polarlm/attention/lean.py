"""Rotation, normalisation and gating in as few passes over memory as possible, forward and backward.

Every pass over the activations costs about as much as a twentieth of the block's matrix products, and autograd's own
derivative of these chains makes two to three times as many passes as needed. Same values as `geometry.rotate` and as
the plain formulas of the others, which torch.compile (it fuses them anyway) and learned phases still use. In fp32 on a
CPU native code does each in one pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.attention.kernels import native_rows
from polarlm.attention.kernels.native_rows import (
    gate,
    gate_backward,
    norm,
    norm_backward,
    sphere,
    sphere_backward,
    takes_rows,
    turn,
)
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


def rotate_heads(
    qkv: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """q and k rotated, and v, each (B, heads, T, Dh), of the fresh projection qkv (B, T, ·), whose memory they take.

    One pass, and one buffer for their gradients. None where that cannot be done.
    """
    fits = qkv.is_contiguous() and not cos.requires_grad and cos.dim() < 4 and cos.dtype == qkv.dtype
    if not fits or not takes_rows(qkv):
        return None
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return _RotatedHeads.apply(qkv, heads, cos, sin)


class _RotatedHeads(torch.autograd.Function):
    """Overwrites what only its own output needs: the derivative of a linear map does not ask what came out."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        by_head = qkv.data.unflatten(-1, (sum(heads), -1)).transpose(1, 2)
        q_k = by_head[:, : heads[0] + heads[1]]
        turn(q_k, cos, sin, inverse=False, out=q_k)
        return by_head.split(heads, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (cos, sin), (d_q, d_k, d_v) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled():  # somebody wants to differentiate this again
            parts = [_Rotation.apply(d_q, cos, -sin), _Rotation.apply(d_k, cos, -sin), d_v]
            return torch.cat(parts, dim=1).transpose(1, 2).flatten(-2), None, None, None
        batch, _, tokens, size = d_q.shape
        d_qkv = d_q.new_empty(batch, tokens, sum(ctx.heads), size)
        to_q, to_k, to_v = d_qkv.transpose(1, 2).split(ctx.heads, dim=1)
        turn(d_q, cos, sin, inverse=True, out=to_q)
        turn(d_k, cos, sin, inverse=True, out=to_k)
        to_v.copy_(d_v)
        return d_qkv.flatten(-2), None, None, None


def on_sphere(x: Tensor, radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """RMS magnitude (..., 1) of the last axis, and x at per-channel RMS `radius`; fp32 or better inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        rms = _rms(wide)
        return rms, (wide * (radius / rms)).to(x.dtype)
    if not torch.is_grad_enabled() and takes_rows(wide):
        rms, direction = sphere(wide, float(radius), SPHERE_EPS)
        return rms, direction.to(x.dtype)
    rms, direction = _Sphere.apply(wide, torch.as_tensor(radius, dtype=wide.dtype, device=x.device))
    return rms, direction.to(x.dtype)


def _rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + SPHERE_EPS).sqrt()


class _Sphere(torch.autograd.Function):
    """With s = radius/rms: y = s x, so dx = s ∂y + x (∂rms − s ⟨∂y, x⟩/rms)/(n rms)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        if takes_rows(x):
            rms, y = sphere(x, float(radius), SPHERE_EPS)
        else:
            rms = _rms(x)
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


def swiglu(x: Tensor) -> Tensor:
    """silu(gate)·up of x (…, 2n), which holds the gate and then the other half."""
    whole_vectors = x.shape[-1] % 32 == 0
    if x.dim() != 3 or not whole_vectors or not takes_rows(x):
        gated, up = x.chunk(2, dim=-1)
        return F.silu(gated) * up
    return _SwiGLU.apply(x) if torch.is_grad_enabled() else gate(x)


class _SwiGLU(torch.autograd.Function):
    """With s = σ(g): ∂g = ∂y u s (1 + g (1 − s)), ∂u = ∂y g s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gate(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (d_y,), (x,) = gradients, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return gate_backward(x, d_y)
        gated, up = x.chunk(2, dim=-1)
        s = gated.sigmoid()
        return torch.cat((d_y * up * s * (1 + gated * (1 - s)), d_y * gated * s), dim=-1)


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), Φ that of the normal distribution."""
    if x.dim() != 3 or x.shape[-1] % 16 or not takes_rows(x):
        return F.gelu(x)
    return _GELU.apply(x) if torch.is_grad_enabled() else native_rows.gelu(x)


class _GELU(torch.autograd.Function):
    """∂x = ∂y (Φ(x) + x φ(x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return native_rows.gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (d_y,), (x,) = gradients, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return native_rows.gelu_backward(x, d_y)
        below, density = torch.special.ndtr(x), (-x.square() / 2).exp() * (2 * math.pi) ** -0.5
        return d_y * (below + x * density)
