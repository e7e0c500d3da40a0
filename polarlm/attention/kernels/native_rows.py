"""Rotation, normalisation and gating by native code (native/rows.h): one pass over memory each, and the way back."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .build import library
from .native_backend import Strides, parallel, unbuilt

WORTH_SHARING = 2**16  # numbers below which waking other threads costs more than they help
CHUNK = 64  # tokens of a task, as in native/rows.h


class _Operand(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("stride", Strides)]


class _Rows(ctypes.Structure):
    """`struct Rows` of native/rows.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "channels", "threads")],
        *[(name, ctypes.c_double) for name in ("radius", "eps")],
        *[(name, _Operand) for name in ("x", "y", "cos", "sin", "rms", "d_y", "d_rms", "d_x", "gain")],
        ("d_radius", ctypes.c_void_p),
        ("d_gain", ctypes.c_void_p),
    ]


def takes_rows(x: Tensor) -> bool:
    """Whether x (B,T,D) or (B,H,T,D) is something the native code works on."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() in (3, 4) and x.numel() > 0
    return fits and unbuilt(x.dtype) is None


def turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, out: Tensor | None = None) -> Tensor:
    """x (B,H,T,D) rotated by tables that broadcast to (B,H,T,D/2); into `out`, which may be x, where it is given."""
    x = _side_by_side(x)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # the layout that attention wants
    cos, sin = (table.expand(*x.shape[:-1], -1) for table in (cos, sin))
    _run("rotate", x, -1.0 if inverse else 1.0, y=out, cos=cos, sin=sin)
    return out


def sphere(x: Tensor, radius: float, eps: float) -> tuple[Tensor, Tensor]:
    """RMS (..., 1) of the rows of x, and x·radius/rms."""
    x = _side_by_side(x)
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x)
    _run("sphere", x, radius, eps, y=y, rms=rms)
    return rms, y


def sphere_backward(x: Tensor, radius: float, rms: Tensor, d_rms: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the radius."""
    x, d_y = _side_by_side(x), _side_by_side(d_y)
    d_x = torch.empty_like(x)
    d_radius = torch.empty(x.shape[0], -(-x.shape[-2] // CHUNK), dtype=torch.float64)
    _run("sphere_backward", x, radius, sums={"d_radius": d_radius}, rms=rms, d_rms=d_rms, d_y=d_y, d_x=d_x)
    return d_x, d_radius.sum().to(x.dtype)


def norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS (B,T,1) of the rows of x (B,T,D), and x·gain/rms."""
    x = _side_by_side(x)
    rms, y = x.new_empty(*x.shape[:-1], 1), torch.empty_like(x)
    _run("norm", x, eps=eps, y=y, rms=rms, gain=gain.expand_as(x))
    return rms, y


def norm_backward(x: Tensor, gain: Tensor, rms: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gain, which is summed in a fixed order."""
    x, d_y = _side_by_side(x), _side_by_side(d_y)
    d_x, d_gain = torch.empty_like(x), x.new_zeros(x.shape[0] * -(-x.shape[1] // CHUNK), x.shape[2])
    _run("norm_backward", x, sums={"d_gain": d_gain}, rms=rms, d_y=d_y, d_x=d_x, gain=gain.expand_as(x))
    return d_x, d_gain.sum(0)


def gate(x: Tensor) -> Tensor:
    """silu(g)·u of x (B,T,2n), which holds g and then u."""
    x = _side_by_side(x)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _run("gate", x, channels=y.shape[-1], y=y)
    return y


def gate_backward(x: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of x."""
    x, d_y = _side_by_side(x), _side_by_side(d_y)
    d_x = torch.empty_like(x)
    _run("gate_backward", x, channels=d_y.shape[-1], d_y=d_y, d_x=d_x)
    return d_x


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x) of x (B,T,n)."""
    x = _side_by_side(x)
    y = torch.empty_like(x)
    _run("gelu", x, y=y)
    return y


def gelu_backward(x: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of x."""
    x, d_y = _side_by_side(x), _side_by_side(d_y)
    d_x = torch.empty_like(x)
    _run("gelu_backward", x, d_y=d_y, d_x=d_x)
    return d_x


def _run(
    name: str,
    x: Tensor,
    radius: float = 1.0,
    eps: float = 0.0,
    channels: int | None = None,
    sums: dict[str, Tensor] | None = None,
    **operands: Tensor,
) -> None:
    shape = x.shape
    threads = torch.get_num_threads() if x.numel() >= WORTH_SHARING else 1
    rows = _Rows(shape[0], shape[1] if len(shape) == 4 else 1, shape[-2], channels or shape[-1], threads, radius, eps)
    operands["x"] = x
    for key, value in operands.items():
        steps = value.stride()
        head = steps[1] if len(steps) == 4 else 0
        setattr(rows, key, _Operand(value.data_ptr(), (steps[0], head, steps[-2])))
    if sums is not None:
        for key, value in sums.items():
            setattr(rows, key, value.data_ptr())
    _function(name)(rows, parallel())


@functools.cache
def _function(name: str) -> Any:
    function = getattr(library("float"), f"polarlm_{name}")
    function.argtypes = (ctypes.POINTER(_Rows), ctypes.c_void_p)
    return function


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
