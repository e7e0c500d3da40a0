"""One way to say what a group of settings may hold: a dataclass is the schema, its fields carry types and ranges.

@dataclass(frozen=True)
class Split:
    rule: str = setting("auto", choices=("auto", "hash"))
    val: float = setting(0.05, at_least=0, below=1)

read_settings(Split, {"val": 2}, "data.split")  # UserError: data.split.val=2 must be a number ≥ 0 and < 1.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from polarlm.errors import UserError, did_you_mean

T = TypeVar("T")
_LIMITS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def setting(
    default: Any, *, choices: Sequence[str] | None = None, at_least: float | None = None, above: float | None = None,
    at_most: float | None = None, below: float | None = None,
) -> Any:  # fmt: skip
    """A field of a schema: its default, and what else than its type limits it."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_settings(schema: type[T], given: Any, prefix: str) -> T:
    """Check a plain mapping against a dataclass; the first wrong key or value is a UserError that says what is allowed.

    A key that is left out, or null where null has no meaning of its own, takes the default.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{prefix}={given!r} must be a group of settings: {', '.join(f.name for f in fields(schema))}.")  # type: ignore[arg-type]
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"Options: {', '.join(known)}."
            raise UserError(f"{prefix}.{key} is not an option. {hint}".strip())
    hints = get_type_hints(schema)
    values = {
        key: _checked(hints[key], value, f"{prefix}.{key}", known[key].metadata)
        for key, value in given.items()
        if value is not None
    }
    return schema(**values)


def _checked(kind: Any, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not type(None))
    if is_dataclass(kind):
        return read_settings(kind, value, key)  # type: ignore[arg-type]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is bool:
        _require(isinstance(value, bool), key, value, "true or false")
    elif origin in (int, float):
        return _number(origin, value, key, limits)
    elif origin is str:
        allowed = limits.get("choices")
        if allowed and value not in allowed:
            hint = did_you_mean(str(value), allowed)
            raise UserError(
                f"{key}={value!r} is not allowed. {hint}Choose one of {', '.join(allowed)}.".replace("  ", " ")
            )
        _require(isinstance(value, str), key, value, "text")
    elif origin is tuple:
        _require(isinstance(value, Sequence) and not isinstance(value, str), key, value, "a list, like [a, b]")
        return tuple(_checked(inner[0], item, f"{key}[{number}]", {}) for number, item in enumerate(value))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _require(isinstance(value, Mapping), key, value, "a mapping, like {name: value}")
        return {str(name): _checked(inner[1], item, f"{key}.{name}", limits) for name, item in value.items()}
    return value


def _number(kind: type, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    word = "a whole number" if kind is int else "a number"
    bounds = [f"{sign} {limits[name]:,}" for name, sign in _LIMITS.items() if name in limits]
    wanted = f"{word} {' and '.join(bounds)}".strip()
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(right and (kind is float or value == int(value)), key, value, wanted)  # 1e6 is a whole number
    number = kind(value)
    inside = {
        "at_least": lambda limit: number >= limit, "above": lambda limit: number > limit,
        "at_most": lambda limit: number <= limit, "below": lambda limit: number < limit,
    }  # fmt: skip
    _require(all(inside[name](limits[name]) for name in _LIMITS if name in limits), key, value, wanted)
    return number


def _require(right: bool, key: str, value: Any, wanted: str) -> None:
    if not right:
        raise UserError(f"{key}={value!r} must be {wanted}.")
