"""Matrix products together with what follows them (heads on spheres, rotated; the feed-forward's activation).

One node of autograd each: what comes after a product overwrites its result, and the way back writes one gradient of it.
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
    activate,
    activate_backward,
    sphere,
    takes_rows,
    turn,
    turned_sphere_backward,
)
from polarlm.attention.rows import SPHERE_EPS, by_plain_formula, rms_of, rows_like
from polarlm.geometry import rotate as plain_rotate

WORTH_ANOTHER_PRODUCT = 64  # rows; finding oneDNN's code again takes some microseconds


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

            return *by_plain_formula(plain, (x, weight), gradients), None, None, None
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
                q_k, m = q_k.unflatten(-1, (sum(heads), -1)).transpose(1, 2), rms_of(v)
                v = (v / m).unflatten(-1, (heads[1], -1)).transpose(1, 2)
                q_k, v = (plain_rotate(part, cos, sin) for part in (q_k * (radius / rms_of(q_k)), v))
                return *q_k.split(heads, dim=1), v, m

            return *by_plain_formula(plain, (x, w_qk, w_v, radius), gradients), *none
        *d_parts, d_turned, d_m = gradients
        d_radius, before_qk, before_v = torch.zeros_like(radius), rows_like(q_k), rows_like(v)
        for d_y, y, scale, d_x in zip(d_parts, *(part.split(heads, dim=1) for part in (q_k, rms, before_qk))):
            d_radius += turned_sphere_backward(y, float(radius), scale, None, d_y, cos, sin, d_x)
        turned_sphere_backward(v, 1.0, m, d_m, d_turned, cos, sin, before_v)
        d_qk, d_v = (part.transpose(1, 2).flatten(-2) for part in (before_qk, before_v))
        needed = ctx.needs_input_grad
        d_x, d_w_qk = _linear_backward(x, w_qk, d_qk, needed)
        more, d_w_v = _linear_backward(x, w_v, d_v, (needed[0], needed[2]))
        d_x = None if d_x is None or more is None else d_x.add_(more)
        return d_x, d_w_qk, d_w_v, d_radius if needed[3] else None, *none


def _linear_backward(x: Tensor, weight: Tensor, d_y: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of x (B, T, d) and W from that of x W^T."""
    d_x = _product(d_y, weight.t()) if needed[0] else None
    return d_x, d_y.flatten(0, 1).t() @ x.flatten(0, 1) if needed[1] else None


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
            return *by_plain_formula(
                lambda x, up, down: F.linear(plain(F.linear(x, up)), down), (x, up, down), gradients
            ), None
        d_active, d_down = _linear_backward(active, down, gradients[0], (True, ctx.needs_input_grad[2]))
        assert d_active is not None, "asked for"
        d_hidden = activate_backward(ctx.kind, hidden, d_active)
        return *_linear_backward(x, up, d_hidden, ctx.needs_input_grad), d_down, None
