"""Fusing the element-wise part of a chunk into one loop with torch.compile, and doing without where that fails."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx.experimental import _config as symbolic_shapes

# Multiply-adds of q·k per call (pairs × channels, so the one wide radial head counts like the heads it spans) below
# which compiling costs more than fusion saves: tests, decoding, toys. 2**27 is 2 million pairs of 64 channels.
WORTH_COMPILING = 2**27

# A chunk is to be one loop: by default inductor writes long expressions to memory and reads them back.
ONE_LOOP: dict[str, Any] = {f"realize_{what}_threshold": 10_000 for what in ("opcount", "reads", "acc_reads")}
# Equal sizes in the first call are chance: they must not become a guard.
INDEPENDENT_SIZES = symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]

_everything = False  # fuse small calls too
_broken: str | None = None  # why the compiler cannot be used, once that is known


def fuse_everything(on: bool) -> None:
    """Fuse calls of any size (`trainer.compile=true`: a long run earns the compilation back), or only large ones."""
    global _everything
    _everything = on


def fused(function: Callable, work: int, **switches) -> Callable:
    """`function` with its keyword `switches` bound: compiled where a call of that much `work` is worth it."""
    compile_it = (_everything or work >= WORTH_COMPILING) and _broken is None
    return _bound(function, compile_it, tuple(sorted(switches.items())))


@cache
def _bound(function: Callable, compile_it: bool, switches: tuple) -> Callable:
    bound = dict(switches)

    def eager(*tensors):
        return function(*tensors, **bound)

    if not compile_it:
        return eager

    # Dynamo limits recompilations per code object: every combination of switches gets its own copy.
    own_code = eager.__code__.replace(co_name="_".join([function.__name__, *(str(value) for value in bound.values())]))
    copy = types.FunctionType(own_code, eager.__globals__, own_code.co_name, closure=eager.__closure__)
    compiled = torch.compile(copy, dynamic=True, fullgraph=True, options=ONE_LOOP)

    def call(*tensors):
        global _broken
        if _broken is not None:
            return eager(*tensors)
        try:
            with INDEPENDENT_SIZES:
                return compiled(*tensors)
        except Exception as error:  # the compiler's errors have no common base class
            _broken = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            warnings.warn(
                f"torch.compile failed ({_broken}); attention runs unfused, several times slower. Install a C++ "
                "compiler (g++) to get the fused loops.",
                stacklevel=2,
            )
            return eager(*tensors)

    return call
