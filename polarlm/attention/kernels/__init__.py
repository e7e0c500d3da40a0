"""Robust attention: one function, several backends that give the same numbers.

`reference` writes the mathematics down; every other backend is tested against it on outputs and gradients. A backend is
a function of a RobustCall, and one that says why it cannot take a call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from polarlm.errors import UserError

from .call import (
    CONSENSUS,
    KERNELS,
    PLAIN_KERNELS,
    RADIAL_CORRELATIONS,
    AttentionOutput,
    RobustCall,
    check_residual_form,
)
from .flex_backend import flex_attention, flex_obstacle
from .native_backend import native_attention, native_obstacle
from .noise import DirectionalNoise, RadialNoise
from .reference import reference_attention
from .selfcheck import check
from .streaming import streaming_attention, streaming_obstacle
from .triton_backend import triton_attention, triton_obstacle

__all__ = [
    "BACKENDS",
    "CONSENSUS",
    "KERNELS",
    "PLAIN_KERNELS",
    "RADIAL_CORRELATIONS",
    "AttentionOutput",
    "DirectionalNoise",
    "RadialNoise",
    "RobustCall",
    "check_residual_form",
    "robust_attention",
]


class Backend(NamedTuple):
    """One way of computing a call."""

    run: Callable[[RobustCall], AttentionOutput]
    obstacle: Callable[[RobustCall], str | None]  # why it cannot take a call, or None


BACKENDS = {
    "reference": Backend(reference_attention, lambda call: None),
    "native": Backend(native_attention, native_obstacle),
    "streaming": Backend(streaming_attention, streaming_obstacle),
    "triton": Backend(triton_attention, triton_obstacle),
    "flex": Backend(flex_attention, flex_obstacle),
}


def robust_attention(call: RobustCall, backend: str = "auto") -> AttentionOutput:
    """Compute the call with the named backend, or with the fastest that can take it."""
    if backend not in ("auto", *BACKENDS):
        raise UserError(f"block.backend is {backend!r}; it must be one of auto, {', '.join(BACKENDS)}.")
    call.check()
    with torch.autocast(call.q.device.type, enabled=False):
        if backend == "auto" or not call.q.numel():
            return BACKENDS[fastest(call)].run(call)
        obstacle = BACKENDS[backend].obstacle(call)
        if obstacle:
            raise UserError(f"block.backend={backend} cannot do this: {obstacle}. Use block.backend=auto.")
        return BACKENDS[backend].run(call)


def fastest(call: RobustCall) -> str:
    """The name of the backend that `auto` stands for."""
    if not call.q.numel() or call.return_weights:
        return "reference"
    device = call.q.device.type
    for kernels in {"cuda": ("triton", "flex"), "cpu": ("native",)}.get(device, ()):
        obstacle = BACKENDS[kernels].obstacle(call)
        if obstacle is None and distrust(kernels, device) is None:
            return kernels
        if obstacle is not None and device == "cpu":
            _warn_plain(obstacle)
    return "streaming"


@torch.compiler.assume_constant_result
def distrust(backend: str, device: str) -> str | None:
    """Why a backend's numbers are not to be used on this kind of device, or None: compared once per process."""
    return _compared(backend, device)


@functools.cache
def _compared(backend: str, device: str) -> str | None:
    reason = check(BACKENDS[backend].run, reference_attention, device).reason
    if reason is not None:
        _warn_once(f"block.backend={backend} failed its check on this machine and is not used: {reason}.")
    return reason


@torch.compiler.assume_constant_result
def _warn_plain(obstacle: str) -> None:
    """Said when a graph is captured, not inside it."""
    _warn_once(f"Attention runs in plain torch, several times slower: {obstacle}.")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
