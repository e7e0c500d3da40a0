"""Robust attention: one function, several backends that give the same numbers.

`reference` follows the equations; every other backend is tested against it on outputs and gradients. A backend is
a function of a RobustCall, and one that says why it cannot take a call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from polarlm.attention.robust import robust_attention
from polarlm.attention.robust.call import AttentionOutput, RobustCall
from polarlm.attention.robust.reference import reference_attention
from polarlm.attention.robust.streaming import streaming_attention, streaming_obstacle
from polarlm.errors import UserError
from polarlm.operations import faster

from .flex_backend import flex_attention, flex_obstacle
from .native_backend import native_attention, native_obstacle
from .selfcheck import GENERAL, Setup, check, setup_of
from .triton_backend import triton_attention, triton_obstacle


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


@faster(robust_attention)
def attend_with(_: Any, call: RobustCall, backend: str = "auto") -> AttentionOutput:
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


# In which order `auto` tries them; everywhere else, and where none of them applies, it is streaming.
TRIED = {"cuda": ("triton", "flex"), "cpu": ("native",)}


class BackendChoice(NamedTuple):
    """What `auto` stood for in a kind of call, and why the backends before it were not taken."""

    backend: str
    device: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.backend + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


_choices: dict[BackendChoice, None] = {}  # of this process, in the order in which they were made


def choices() -> list[BackendChoice]:
    """Every choice that `auto` made in this process so far."""
    return list(_choices)


def forget_choices() -> None:
    """Begin anew, e.g. for the next run of this process."""
    _choices.clear()


def fastest(call: RobustCall) -> str:
    """The name of the backend that `auto` stands for."""
    if not call.q.numel() or call.return_weights:
        return "reference"
    device = call.q.device.type
    obstacles = tuple(BACKENDS[name].obstacle(call) for name in TRIED.get(device, ()))
    # A CPU's kernels are one compiled file; a GPU's are compiled anew for every kind of call.
    return _choose(device, obstacles, setup_of(call) if device == "cuda" else None)


@torch.compiler.assume_constant_result
def _choose(device: str, obstacles: tuple[str | None, ...], setup: tuple[Any, ...] | None) -> str:
    """Decided while a graph is captured, not inside it."""
    reasons: list[str] = []
    for name, obstacle in zip(TRIED.get(device, ()), obstacles):
        reason = obstacle or distrust(name, device, setup)
        if reason is None:
            _choices[BackendChoice(name, device, tuple(reasons))] = None
            return name
        reasons.append(f"{name}: {reason}")
    _choices[BackendChoice("streaming", device, tuple(reasons))] = None
    slower = "about ten times" if device == "cuda" else "several times"
    _warn_once(f"Attention runs in plain torch, {slower} slower. {'; '.join(reasons) or f'No kernels for {device}'}.")
    return "streaming"


def distrust(backend: str, device: str, setup: tuple[Any, ...] | None = None) -> str | None:
    """Why a backend's numbers are not to be used here for calls of this setup, or None: compared once per process."""
    return _compared(backend, device, setup)


@functools.cache
def _compared(backend: str, device: str, setup: tuple[Any, ...] | None) -> str | None:
    setups = GENERAL if setup is None else (Setup(*setup),)
    reason = check(BACKENDS[backend].run, reference_attention, device, setups).reason
    if reason is not None:
        _warn_once(f"block.backend={backend} failed its check on this machine and is not used: {reason}.")
    return reason


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
