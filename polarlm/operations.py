"""Operations: named plain functions that polarlm/fast may replace by faster versions.

    @operation                      # geometry, attention, model: what is computed, in plain torch
    def rotate(x, cos, sin): ...

    @faster(rotate)                 # polarlm/fast: the same numbers, faster; `otherwise` is the plain function
    def rotate_natively(otherwise, x, cos, sin): ...

The model calls `rotate`. Behind a closed door (`with closed():`, or POLARLM_FAST=0 for a whole process), and without
the package polarlm/fast, every operation is its plain function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

SWITCH = "POLARLM_FAST"  # environment variable; 0 keeps the door closed
F = TypeVar("F", bound=Callable[..., Any])

_faster: dict[Any, Callable[..., Any]] = {}  # operation: what stands in for it
_open = os.environ.get(SWITCH, "1") != "0"


def operation(function: F) -> F:
    """Make a plain function an operation that polarlm/fast may replace; callers see the same signature."""
    # A partial is called without a Python frame in between, and torch.compile sees through it.
    named: Any = functools.partial(function)
    functools.update_wrapper(named, function)
    return named


def plain(operation: F) -> F:
    """The plain function behind an operation."""
    return operation.__wrapped__  # type: ignore[attr-defined]


def faster(operation: Callable[..., Any]) -> Callable[[F], F]:
    """Let the decorated function stand in for an operation.

    Its first argument is the plain function, which it calls where it does not apply.
    """

    def register(function: F) -> F:
        _faster[operation] = function
        if _open:
            _point(operation, function, plain(operation))
        return function

    return register


def _point(operation: Any, function: Callable[..., Any], *first: Any) -> None:
    operation.__setstate__((function, first, {}, operation.__dict__))  # the only way to give a partial another function


def open_door() -> None:
    """Load polarlm/fast, where there is one and nobody has closed the door: called by whoever builds a model."""
    name = f"{__package__}.fast"  # a copy of this file in another package (an exported model) has none
    if _open and __package__ and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)


@contextlib.contextmanager
def closed(when: bool = True) -> Iterator[None]:
    """Compute with plain functions alone. torch.compile gets those anyway, so a traced model need not ask."""
    global _open
    if not when or not _open or torch.compiler.is_compiling():
        yield
        return
    _open = False
    try:
        for operation in _faster:
            _point(operation, plain(operation))
        yield
    finally:
        _open = True
        for operation, function in _faster.items():
            _point(operation, function, plain(operation))
