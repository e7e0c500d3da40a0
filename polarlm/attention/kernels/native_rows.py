"""Rotation, normalisation and gating by native code (native/rows.h): one pass over memory each, and the way back."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarlm.geometry.multihead import PROJECTIONS

from .build import library
from .native_backend import parallel, unbuilt
from .operator import dense_channels

WORTH_SHARING = 2**16  # numbers below which waking other threads costs more than they help


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


def takes_rows(x: Tensor) -> bool:
    """Whether x (B,T,D) or (B,H,T,D) is something the native code works on."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() in (3, 4) and x.numel() > 0
    return fits and unbuilt(x.dtype) is None


def turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, out: Tensor | None = None) -> Tensor:
    """x (B,H,T,D) rotated by tables that broadcast to (B,H,T,D/2); into `out`, which may be x, where it is given."""
    x = dense_channels(x)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # the layout that attention wants
    _run("rotate", x, -1.0 if inverse else 1.0, y=out, cos=cos, sin=sin)
    return out


def sphere(x: Tensor, radius: float, eps: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMS (..., 1) of the rows of x, and x·radius/rms; into `out`, which may be x, where it is given."""
    x = dense_channels(x)
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x) if out is None else out
    _run("sphere", x, radius, eps, y=y, rms=rms)
    return rms, y


def sphere_backward(x: Tensor, radius: float, rms: Tensor, d_rms: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the radius."""
    x, d_y = dense_channels(x), dense_channels(d_y)
    d_x, d_radius = torch.empty_like(x), torch.empty((), dtype=torch.float64)
    _run("sphere_backward", x, radius, total=d_radius, rms=rms, d_rms=d_rms, d_y=d_y, d_x=d_x)
    return d_x, d_radius.to(x.dtype)


def turned_sphere_backward(
    y: Tensor, radius: float, rms: Tensor, d_rms: Tensor | None, d_y: Tensor, cos: Tensor, sin: Tensor, out: Tensor
) -> Tensor:
    """Gradient of x, into `out`, where y (B,H,T,D) is x·radius/rms turned; returns that of the radius.

    With rms (B,T,1) one RMS holds for all heads, with (B,H,T,1) each head has its own.
    """
    d_y, d_radius = dense_channels(d_y), torch.empty((), dtype=torch.float64)
    _run(
        "turned_sphere_backward", y, radius, mode=int(rms.dim() == 3), total=d_radius,
        rms=rms, d_rms=d_rms, d_y=d_y, cos=cos, sin=sin, d_x=out,
    )  # fmt: skip
    return d_radius.to(y.dtype)


class TangentStep(NamedTuple):
    """A step across v, `change` of it along v: (x − lost v)·scale + change v, lost by the projection and evidence."""

    scale: float
    projection: str
    clamp: float  # of the evidence, none if negative
    evidence: Tensor | None = None  # (B,H,T)
    change: Tensor | None = None  # (B,T)

    def run(self, name: str, v: Tensor, x: Tensor, **operands: Tensor | None) -> None:
        """One of the two passes below."""
        evidence, change = (None if x is None else x.unsqueeze(-1) for x in (self.evidence, self.change))
        mode = PROJECTIONS.index(self.projection)
        operands |= {"other": v, "evidence": evidence, "change": change}
        _run(name, x, self.scale, self.clamp, None, mode, None, **operands)


def tangent(v: Tensor, x: Tensor, step: TangentStep, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Into `out` (B,H,T,D): the step of estimates x from a token's own values v, turned back."""
    step.run("tangent", v, x, y=out, cos=cos, sin=sin)


def tangent_backward(
    v: Tensor, x: Tensor, step: TangentStep, cos: Tensor, sin: Tensor, d_y: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of v, of x, and of the step's evidence and change."""
    d_v, d_x, d_y = torch.empty_like(v), torch.empty_like(x), dense_channels(d_y)
    small = [None if y is None else torch.empty_like(y).unsqueeze(-1) for y in (step.evidence, step.change)]
    step.run(
        "tangent_backward", v, x, cos=cos, sin=sin, d_y=d_y, d_x=d_x, d_other=d_v,
        d_evidence=small[0], d_change=small[1],
    )  # fmt: skip
    return d_v, d_x, *(None if y is None else y.squeeze(-1) for y in small)


def across(x: Tensor, step: Tensor) -> Tensor:
    """x (B,T,D) after a step that has lost its part along x."""
    x, step = dense_channels(x), dense_channels(step)
    y = torch.empty_like(x)
    _run("across", x, y=y, other=step)
    return y


def across_backward(x: Tensor, step: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the step."""
    x, step, d_y = dense_channels(x), dense_channels(step), dense_channels(d_y)
    d_x, d_step = torch.empty_like(x), torch.empty_like(step)
    _run("across_backward", x, other=step, d_y=d_y, d_x=d_x, d_other=d_step)
    return d_x, d_step


def norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS (B,T,1) of the rows of x (B,T,D), and x·gain/rms."""
    x = dense_channels(x)
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x)
    _run("norm", x, eps=eps, y=y, rms=rms, other=gain)
    return rms, y


def norm_backward(x: Tensor, gain: Tensor, rms: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gain, which is summed in a fixed order."""
    x, d_y = dense_channels(x), dense_channels(d_y)
    d_x, d_gain = torch.empty_like(x), torch.empty_like(gain)
    _run("norm_backward", x, total=d_gain, rms=rms, d_y=d_y, d_x=d_x, other=gain)
    return d_x, d_gain


def activate(kind: str, x: Tensor) -> Tensor:
    """`gelu`: x·Φ(x) of x (B,T,n); `swiglu`: silu(g)·u of x (B,T,2n), which holds g and then u."""
    x = dense_channels(x)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if kind == "swiglu" else 1))
    _run(kind, x, channels=y.shape[-1], y=y)
    return y


def activate_backward(kind: str, x: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of x, which GELU's writes over that of y."""
    x, d_y = dense_channels(x), dense_channels(d_y)
    d_x = torch.empty_like(x) if kind == "swiglu" else d_y
    _run(f"{kind}_backward", x, channels=d_y.shape[-1], d_y=d_y, d_x=d_x)
    return d_x


def _run(
    name: str,
    x: Tensor,
    radius: float = 1.0,
    eps: float = 0.0,
    channels: int | None = None,
    mode: int = 0,
    total: Tensor | None = None,
    **operands: Tensor | None,
) -> None:
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
