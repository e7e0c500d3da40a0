"""Rotation, normalisation and gating in as few passes over memory as possible, forward and backward.

Every pass over the activations costs about as much as a twentieth of the block's matrix products, and autograd's own
derivative of these chains makes two to three times as many passes as needed. Same values as `geometry.rotate` and as
the plain formulas of the others, which torch.compile (it fuses them anyway) and learned phases still use. In fp32 on a
CPU native code does each in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.kernels.build import processor
from polarlm.attention.kernels.native_rows import (
    TangentStep,
    across,
    across_backward,
    activate,
    activate_backward,
    norm,
    norm_backward,
    sphere,
    sphere_backward,
    takes_rows,
    tangent,
    tangent_backward,
    turn,
    turned_sphere_backward,
)
from polarlm.geometry import project, tangential_part
from polarlm.geometry import rotate as plain_rotate

# Only keeps the zero vector finite: a fresh un-normalised stream is small but meaningful.
SPHERE_EPS = 1e-12
WORTH_ANOTHER_PRODUCT = 64  # rows; finding oneDNN's code again takes some microseconds


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


@functools.cache
def _other_product() -> Any:
    """oneDNN's x W^T where it is the faster one: on AMD's processors MKL leaves their widest vectors unused.

    A rule and not a measurement, so that a run repeated on a machine gives the same bits. The operator is not public:
    one small product shows whether this torch still has it as we call it.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and "AMD" in processor()
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if not wide or product is None or not torch.backends.mkldnn.is_available():
        return None
    x, weight = torch.arange(12.0).view(1, 3, 4), torch.arange(8.0).view(2, 4)
    try:
        same = torch.equal(product(x, weight, None, "none", [], ""), F.linear(x, weight))
    except (RuntimeError, TypeError):
        return None
    return product if same else None


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of fp32 numbers on a CPU."""
    if x.shape[0] * x.shape[1] < WORTH_ANOTHER_PRODUCT or not torch.backends.mkldnn.enabled or not _other_product():
        return F.linear(x, weight)
    return _other_product()(x, weight, None, "none", [], "")


def takes_products(x: Tensor, *layers: nn.Linear) -> bool:
    """Whether x (B, T, d) and these maps may be multiplied here: fp32, and nobody listens to the maps."""
    plain = x.dim() == 3 and not torch.is_autocast_enabled("cpu") and takes_rows(x)
    return plain and all(
        type(layer) is nn.Linear
        and layer.bias is None
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype == x.dtype
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
        for layer in layers
    )


def rotated_heads(
    x: Tensor, layer: nn.Linear, heads: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """q and k rotated, and v, each (B, heads, T, Dh), of the projection of x (B, T, d); None where it takes other ways.

    The rotation overwrites the projection, and the way back writes one gradient of it.
    """
    if cos.requires_grad or cos.dim() == 4 or cos.dtype != x.dtype or not takes_products(x, layer):
        return None
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return _RotatedHeads.apply(x, layer.weight, heads, cos, sin)


class _RotatedHeads(torch.autograd.Function):
    """x W^T, cut into heads, those of q and k rotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.heads = heads
        by_head = _product(x, weight).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
        q_k = by_head[:, : heads[0] + heads[1]]
        turn(q_k, cos, sin, inverse=False, out=q_k)
        return by_head.split(heads, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
                q, k, v = F.linear(x, weight).unflatten(-1, (sum(ctx.heads), -1)).transpose(1, 2).split(ctx.heads, 1)
                return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v

            return *_again(plain, (x, weight), gradients), None, None, None
        d_q, d_k, d_v = gradients
        batch, _, tokens, size = d_q.shape
        d_qkv = d_q.new_empty(batch, tokens, sum(ctx.heads), size)
        to_q, to_k, to_v = d_qkv.transpose(1, 2).split(ctx.heads, dim=1)
        turn(d_q, cos, sin, inverse=True, out=to_q)
        turn(d_k, cos, sin, inverse=True, out=to_k)
        to_v.copy_(d_v)
        return *_linear_backward(x, weight, d_qkv.flatten(-2), ctx.needs_input_grad), None, None, None


def sphere_heads(
    x: Tensor, qk: nn.Linear, v: nn.Linear, heads: tuple[int, int], radius: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """q and k (B, heads, T, Dh) on spheres and rotated, v too, and v's RMS (B, T, 1); None where it takes other ways.

    They are projections of x (B, T, d), q and k at RMS `radius` in every head, v at RMS 1 over all of them. What they
    were before can be told from what they became, so only that is kept.
    """
    if cos.requires_grad or cos.dim() == 4 or cos.dtype != x.dtype or not takes_products(x, qk, v):
        return None
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return _SphereHeads.apply(x, qk.weight, v.weight, radius, heads, cos, sin)


class _SphereHeads(torch.autograd.Function):
    """On spheres and rotated, in the memory of the projections."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_qk: Tensor, w_v: Tensor, radius: Tensor, heads: tuple[int, int], cos: Tensor, sin: Tensor
    ) -> Any:
        q_k = _product(x, w_qk).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
        rms, _ = sphere(q_k, float(radius), SPHERE_EPS, out=q_k)
        flat = _product(x, w_v)
        m, _ = sphere(flat, 1.0, SPHERE_EPS, out=flat)
        v = flat.unflatten(-1, (heads[1], -1)).transpose(1, 2)
        for part in (q_k, v):
            turn(part, cos, sin, inverse=False, out=part)
        ctx.save_for_backward(x, w_qk, w_v, radius, cos, sin, q_k, rms, v, m)
        ctx.heads = heads
        return *q_k.split(heads, dim=1), v, m

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w_qk, w_v, radius, cos, sin, q_k, rms, v, m = ctx.saved_tensors
        heads, none = ctx.heads, (None, None, None)
        if torch.is_grad_enabled():

            def plain(x: Tensor, w_qk: Tensor, w_v: Tensor, radius: Tensor) -> tuple[Tensor, ...]:
                q_k, v = (F.linear(x, w) for w in (w_qk, w_v))
                q_k, m = q_k.unflatten(-1, (sum(heads), -1)).transpose(1, 2), _rms(v)
                v = (v / m).unflatten(-1, (heads[1], -1)).transpose(1, 2)
                q_k, v = (plain_rotate(part, cos, sin) for part in (q_k * (radius / _rms(q_k)), v))
                return *q_k.split(heads, dim=1), v, m

            return *_again(plain, (x, w_qk, w_v, radius), gradients), *none
        *d_parts, d_turned, d_m = gradients
        d_radius, before_qk, before_v = torch.zeros_like(radius), _rows_like(q_k), _rows_like(v)
        for d_y, y, scale, d_x in zip(d_parts, *(part.split(heads, dim=1) for part in (q_k, rms, before_qk))):
            d_radius += turned_sphere_backward(y, float(radius), scale, None, d_y, cos, sin, d_x)
        turned_sphere_backward(v, 1.0, m, d_m, d_turned, cos, sin, before_v)
        d_qk, d_v = (part.transpose(1, 2).flatten(-2) for part in (before_qk, before_v))
        needed = ctx.needs_input_grad
        d_x, d_w_qk = _linear_backward(x, w_qk, d_qk, needed)
        more, d_w_v = _linear_backward(x, w_v, d_v, (needed[0], needed[2]))
        d_x = None if d_x is None or more is None else d_x.add_(more)
        return d_x, d_w_qk, d_w_v, d_radius if needed[3] else None, *none


def _rows_like(x: Tensor) -> Tensor:
    """Unwritten, of the shape of x (B, H, T, Dh), with a token's heads side by side."""
    batch, heads, tokens, size = x.shape
    return x.new_empty(batch, tokens, heads, size).transpose(1, 2)


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
        out = _rows_like(v)
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

            again = iter(_again(plain, tuple(x for x in (v, v_bar, evidence, change) if x is not None), gradients))
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
            return _again(lambda x, step: x + tangential_part(x, step), ctx.saved_tensors, gradients)
        x, step = ctx.saved_tensors
        return across_backward(x, step, gradients[0])


def _linear_backward(x: Tensor, weight: Tensor, d_y: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of x (B, T, d) and W from that of x W^T."""
    d_x = _product(d_y, weight.t()) if needed[0] else None
    return d_x, d_y.flatten(0, 1).t() @ x.flatten(0, 1) if needed[1] else None


def _again(
    plain: Callable[..., Any], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients by the plain formula, for somebody who wants to differentiate them again."""
    # One may have been made from another: how is not this node's business.
    inputs = tuple(x.view_as(x) for x in inputs)
    asked = [x for x in inputs if x.requires_grad]
    given = iter(torch.autograd.grad(plain(*inputs), asked, gradients, create_graph=True))
    return tuple(next(given) if x.requires_grad else None for x in inputs)


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


def _swiglu(x: Tensor) -> Tensor:
    gated, up = x.chunk(2, dim=-1)
    return F.silu(gated) * up


# The plain formulas: x Phi(x), and silu(gate) up of x (..., 2n) = (gate, up).
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "swiglu": _swiglu}


def feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear, kind: str) -> Tensor:
    """W_down f(W_up x), f one of ACTIVATIONS."""
    if up.out_features % 32 or not takes_products(x, up, down):
        return down(ACTIVATIONS[kind](up(x)))
    if not torch.is_grad_enabled():
        return _product(activate(kind, _product(x, up.weight)), down.weight)
    return _FeedForward.apply(x, up.weight, down.weight, kind)


class _FeedForward(torch.autograd.Function):
    """Both products and what is between them: one node, and the gradient of f may overwrite what came from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
        hidden = _product(x, up)
        active = activate(kind, hidden)
        ctx.save_for_backward(x, up, down, hidden, active)
        ctx.kind = kind
        return _product(active, down)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, hidden, active = ctx.saved_tensors
        plain = ACTIVATIONS[ctx.kind]
        if torch.is_grad_enabled():
            return *_again(lambda x, up, down: F.linear(plain(F.linear(x, up)), down), (x, up, down), gradients), None
        d_active, d_down = _linear_backward(active, down, gradients[0], (True, ctx.needs_input_grad[2]))
        assert d_active is not None, "asked for"
        d_hidden = activate_backward(ctx.kind, hidden, d_active)
        return *_linear_backward(x, up, d_hidden, ctx.needs_input_grad), d_down, None
