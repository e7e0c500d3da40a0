"""Native passes over memory (native/rows.h), and what every transformer does with them: norm, heads, feed-forward.

A pass does in one sweep what torch does in three to six, forward and backward. They take fp32 on a CPU.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.projections import rotated_heads, sphere_heads
from polarlm.geometry.multihead import PROJECTIONS, Projection, tangent_step
from polarlm.geometry.sphere import SPHERE_EPS, add_tangential, on_sphere
from polarlm.geometry.transport import rotate
from polarlm.model.block import rms_norm
from polarlm.model.feed_forward import feed_forward
from polarlm.operations import faster, plain
from polarlm.startup import processor

from .build import library
from .native_backend import dense_channels, parallel, unbuilt

WORTH_SHARING = 2**16  # numbers below which waking other threads costs more than they help
WORTH_ANOTHER_PRODUCT = 64  # rows; finding oneDNN's code again takes some microseconds

# Of native/rows.h and native/native.cpp, in their order.
NUMBERS = ("batch", "heads", "tokens", "channels", "threads", "mode")
OPERANDS = (
    "x", "y", "cos", "sin", "rms", "d_y", "d_rms", "d_x", "other", "d_other",
    "evidence", "change", "d_evidence", "d_change",
)  # fmt: skip
PASSES = (
    "rotate", "sphere", "norm", "swiglu", "swiglu_backward", "gelu", "gelu_backward", "tangent", "tangent_backward",
    "across", "across_backward",
    "sphere_backward", "turned_sphere_backward", "norm_backward",
)  # fmt: skip
# An address and three strides for every operand, and where sums go. Packed at once: filling in a structure of ctypes
# would take longer than a small pass itself.
WORDS = struct.Struct(f"{len(NUMBERS) + 4 * len(OPERANDS) + 1}q")
NUMBER_OF = {name: number for number, name in enumerate(PASSES)}
NOTHING = (0, 0, 0, 0)


def takes_pass(x: Tensor) -> bool:
    """Whether x (B,T,D) or (B,H,T,D) is something the native passes work on."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() in (3, 4) and x.numel() > 0 and _built()


@functools.cache
def _built() -> bool:
    return unbuilt(torch.float32) is None


def run_pass(
    name: str,
    x: Tensor,
    radius: float = 1.0,
    eps: float = 0.0,
    channels: int | None = None,
    mode: int = 0,
    total: Tensor | None = None,
    **operands: Tensor | None,
) -> None:
    """One of PASSES over the rows of x, whose channels lie side by side, as do those of all operands."""
    shape = x.shape
    threads = torch.get_num_threads() if x.numel() >= WORTH_SHARING else 1
    words = [shape[0], shape[1] if len(shape) == 4 else 1, shape[-2], channels or shape[-1], threads, mode, *_at(x)]
    for key in OPERANDS[1:]:
        words += _at(operands.get(key))
    words.append(0 if total is None else total.data_ptr())
    _function()(NUMBER_OF[name], WORDS.pack(*words), radius, eps, parallel())


def _at(x: Tensor | None) -> tuple[int, int, int, int]:
    """Address, and strides of batch, head and token: 0 along axes that it lacks, or has once for all."""
    if x is None:
        return NOTHING
    if x.dim() == 1:
        return x.data_ptr(), 0, 0, 0
    steps = [0 if size == 1 else step for size, step in zip(x.shape, x.stride())]
    return x.data_ptr(), steps[0] if len(steps) > 2 else 0, steps[1] if len(steps) == 4 else 0, steps[-2]


@functools.cache
def _function() -> Any:
    function = library("float").polarlm_rows
    function.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_double, ctypes.c_double, ctypes.c_void_p)
    function.restype = None
    return function


def node(formula: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A differentiable function made of native passes.

    `forward(*arguments)` gives its outputs and what else the backward pass needs; `backward(arguments, kept, gradients,
    needed)` gives a gradient for each of the first arguments. Whoever differentiates that again gets `formula`.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            outputs, kept = forward(*arguments)
            ctx.others = [None if isinstance(x, Tensor) else (x,) for x in arguments]
            ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)), *kept)
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            arguments = [next(saved) if other is None else other[0] for other in ctx.others]
            if torch.is_grad_enabled():
                return _by_formula(formula, arguments, ctx.needs_input_grad, gradients)
            made = backward(arguments, list(saved), gradients, ctx.needs_input_grad)
            return *made, *[None] * (len(arguments) - len(made))

    return Node.apply


def _by_formula(
    formula: Callable[..., Any], arguments: list[Any], needed: Sequence[bool], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    # One may have been made from another: how is not this node's business.
    arguments = [x.view_as(x) if isinstance(x, Tensor) else x for x in arguments]
    asked = [x for x, wanted in zip(arguments, needed) if wanted]
    given = iter(torch.autograd.grad(formula(*arguments), asked, gradients, create_graph=True))
    return tuple(next(given) if wanted else None for wanted in needed)


# ------------------------------------------------------------------------------------------------------------ norm


@faster(rms_norm)
def norm_natively(otherwise: Callable, x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """In one pass each way."""
    wide = x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))
    if wide.dim() != 3 or gain.dtype != wide.dtype or not takes_pass(wide):
        return otherwise(x, gain, eps)
    y = _norm(wide, gain, eps) if torch.is_grad_enabled() else _norm_forward(wide, gain, eps)[0]
    return y if x is wide else y.to(x.dtype)


def _norm_forward(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, list[Tensor]]:
    x = x.contiguous()
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x)
    run_pass("norm", x, eps=eps, y=y, rms=rms, other=gain)
    return y, [rms]


def _norm_backward(arguments: list[Any], kept: list[Tensor], gradients: tuple[Tensor, ...], _: Any) -> tuple:
    """With g = gain ∂y: dx = (g − x ⟨g, x⟩/(n rms²))/rms; the gain's gradient is summed in a fixed order."""
    x, d_y, gain = dense_channels(arguments[0]), dense_channels(gradients[0]), arguments[1]
    d_x, d_gain = torch.empty_like(x), torch.empty_like(gain)
    run_pass("norm_backward", x, total=d_gain, rms=kept[0], d_y=d_y, d_x=d_x, other=gain)
    return d_x, d_gain


_norm = node(plain(rms_norm), _norm_forward, _norm_backward)


# --------------------------------------------------------------------------------------------------- matrix products


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


def matrix_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of fp32 numbers on a CPU."""
    if x.shape[0] * x.shape[1] < WORTH_ANOTHER_PRODUCT or not torch.backends.mkldnn.enabled or not _other_product():
        return F.linear(x, weight)
    return _other_product()(x, weight, None, "none", [], "")


def matrix_product_backward(
    x: Tensor, weight: Tensor, d_y: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of x (B, T, d) and W from that of x W^T."""
    d_x = matrix_product(d_y, weight.t()) if needed[0] else None
    return d_x, d_y.flatten(0, 1).t() @ x.flatten(0, 1) if needed[1] else None


def takes_products(x: Tensor, *layers: nn.Linear) -> bool:
    """Whether x (B, T, d) and these maps may be multiplied here: fp32, and nobody listens to the maps."""
    usual = x.dim() == 3 and not torch.is_autocast_enabled("cpu") and takes_pass(x)
    return usual and all(
        type(layer) is nn.Linear
        and layer.bias is None
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype == x.dtype
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
        for layer in layers
    )


def takes_tables(cos: Tensor, x: Tensor) -> bool:
    """Whether these rotary tables turn all heads of x alike, and nobody learns them."""
    return not cos.requires_grad and cos.dim() < 4 and cos.dtype == x.dtype


def by_head(table: Tensor) -> Tensor:
    """A table (T, Dh/2) or (B, T, Dh/2) with an axis for the heads."""
    return table.unsqueeze(-3) if table.dim() == 3 else table


def by_matrix(weight: Tensor) -> Any:
    """A map by its matrix, for plain formulas that take a layer."""
    return lambda x: F.linear(x, weight)


@faster(rotated_heads)
def rotate_heads_natively(
    otherwise: Callable, x: Tensor, layer: nn.Linear, heads: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotation overwrites the projection, and its backward pass writes one gradient of it."""
    if not takes_tables(cos, x) or not takes_products(x, layer):
        return otherwise(x, layer, heads, cos, sin)
    return _rotated_heads(x, layer.weight, heads, by_head(cos), by_head(sin))


def _rotated_heads_forward(x: Tensor, weight: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor) -> Any:
    projected = matrix_product(x, weight).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
    q_k = projected[:, : heads[0] + heads[1]]
    run_pass("rotate", q_k, y=q_k, cos=cos, sin=sin)
    return projected.split(heads, dim=1), []


def _rotated_heads_backward(
    arguments: list[Any], _: list[Tensor], gradients: tuple[Tensor, ...], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    x, weight, heads, cos, sin = arguments
    d_q, d_k, d_v = gradients
    batch, tokens, size = d_q.shape[0], *d_q.shape[2:]
    d_qkv = d_q.new_empty(batch, tokens, sum(heads), size)
    to_q, to_k, to_v = d_qkv.transpose(1, 2).split(heads, dim=1)
    for d_part, to in ((d_q, to_q), (d_k, to_k)):
        run_pass("rotate", dense_channels(d_part), -1.0, y=to, cos=cos, sin=sin)
    to_v.copy_(d_v)
    return matrix_product_backward(x, weight, d_qkv.flatten(-2), needed)


_rotated_heads = node(
    lambda x, weight, *rest: plain(rotated_heads)(x, by_matrix(weight), *rest),
    _rotated_heads_forward,
    _rotated_heads_backward,
)


@faster(feed_forward)
def feed_forward_natively(otherwise: Callable, x: Tensor, up: nn.Linear, down: nn.Linear, kind: str) -> Tensor:
    """Both products and the activation as one node; GELU's gradient overwrites what came from above."""
    if up.out_features % 32 or not takes_products(x, up, down):
        return otherwise(x, up, down, kind)
    if not torch.is_grad_enabled():
        return _feed_forward_forward(x, up.weight, down.weight, kind)[0]
    return _feed_forward(x, up.weight, down.weight, kind)


def _feed_forward_forward(x: Tensor, up: Tensor, down: Tensor, kind: str) -> tuple[Tensor, list[Tensor]]:
    hidden = matrix_product(x, up)
    active = hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // (2 if kind == "swiglu" else 1))
    run_pass(kind, hidden, channels=active.shape[-1], y=active)
    return matrix_product(active, down), [hidden, active]


def _feed_forward_backward(
    arguments: list[Any], kept: list[Tensor], gradients: tuple[Tensor, ...], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    (x, up, down, kind), (hidden, active) = arguments, kept
    d_active, d_down = matrix_product_backward(active, down, gradients[0], (True, needed[2]))
    assert d_active is not None, "asked for"
    d_active = dense_channels(d_active)
    d_hidden = torch.empty_like(hidden) if kind == "swiglu" else d_active
    run_pass(f"{kind}_backward", hidden, channels=d_active.shape[-1], d_y=d_active, d_x=d_hidden)
    return *matrix_product_backward(x, up, d_hidden, needed), d_down


_feed_forward = node(
    lambda x, up, down, kind: plain(feed_forward)(x, by_matrix(up), by_matrix(down), kind),
    _feed_forward_forward,
    _feed_forward_backward,
)


# ---------------------------------------------------------------------------- rotation, spheres and tangent steps


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
    x = dense_channels(x) if out is None else x
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
