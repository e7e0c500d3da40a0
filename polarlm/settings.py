"""Checked settings: a dataclass is the schema of a group, its fields have types and ranges.

@dataclass(frozen=True)
class Split:
    rule: str = setting("auto", choices=("auto", "hash"))
    val: float = setting(0.05, at_least=0, below=1)

read_settings(Split, {"val": 2}, "data.split")  # UserError: data.split.val=2 must be a number ≥ 0 and < 1.

Types: bool, int (1e6 is one), float, str, None, tuple, list, Mapping, another schema, Any, and unions of them.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from polarlm.errors import UserError, did_you_mean

T = TypeVar("T")
# Between these, fp32 holds the scalars of a block with their squares and quotients; noises and rates may also be 0.
SMALLEST, LARGEST = 1e-9, 10**8
LARGEST_COUNT = 2**63
_LIMITS = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}


def setting(
    default: Any = MISSING, *, choices: Sequence[Any] | None = None, pattern: str | None = None, like: str = "text",
    count: int | None = None, at_least: float | None = None, above: float | None = None, at_most: float | None = None,
    below: float | None = None,
) -> Any:  # fmt: skip
    """A field of a schema: its default (none: the key must be given), and what else than its type limits it.

    `choices` are the words or numbers allowed, `pattern` is a regular expression for text which `like` says in words,
    `count` is the length of a list, and the bounds are for numbers, also inside lists and mappings.
    """
    limits: dict[str, Any] = {"choices": choices, "pattern": pattern, "count": count}
    limits |= {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata: dict[str, Any] = {"like": like} | {name: limit for name, limit in limits.items() if limit is not None}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_settings(schema: type[T], given: Any, prefix: str) -> T:
    """Check a plain mapping against a dataclass; the first wrong key or value is a UserError that says what is allowed.

    A key that is left out takes its default.
    """
    return schema(**_values(schema, given, prefix, plain=False))


def plain_settings(schema: type, given: Any, prefix: str) -> dict[str, Any]:
    """The same check; returns a plain mapping with the given keys only, each value of the right type."""
    return _values(schema, given, prefix, plain=True)


def check_value(schema: type, name: str, value: Any, prefix: str) -> Any:
    """Check one value against the field `name` of a schema."""
    limits = next(f.metadata for f in fields(schema) if f.name == name)
    return checked_value(_hints(schema)[name], value, _join(prefix, name), limits)


def checked_value(kind: Any, value: Any, key: str, limits: Mapping[str, Any] | None = None) -> Any:
    """A value of this type and within these limits, as plain data."""
    return _checked(kind, value, key, limits or {}, plain=True)


def _values(schema: type, given: Any, prefix: str, *, plain: bool) -> dict[str, Any]:
    known = {f.name: f for f in fields(schema)}
    if not isinstance(given, Mapping):
        raise UserError(f"{prefix}={given!r} must be a group of settings: {', '.join(known)}.")
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"Options: {', '.join(known)}."
            raise UserError(f"{_join(prefix, key)} is not an option. {hint}".strip())
    for key, one in known.items():
        if key not in given and one.default is MISSING and one.default_factory is MISSING:
            raise UserError(f"{_join(prefix, key)} must be given: {_join(prefix, key)}=….")
    hints = _hints(schema)
    return {
        key: _checked(hints[key], value, _join(prefix, key), known[key].metadata, plain=plain)
        for key, value in given.items()
    }


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


class _Wrong(Exception):
    """The value is not of this type; the text says what it must be."""


def _checked(kind: Any, value: Any, key: str, limits: Mapping[str, Any], *, plain: bool) -> Any:
    try:
        return _converted(kind, value, key, limits, plain=plain)
    except _Wrong as wrong:
        words = [str(word) for word in limits.get("choices", ())]
        if str(wrong) == ", ".join(words):
            hint = did_you_mean(str(value), words)
            raise UserError(f"{key}={value!r} is not allowed. {hint}Choose one of {wrong}.") from None
        raise UserError(f"{key}={value!r} must be {wrong}.") from None


def _converted(kind: Any, value: Any, key: str, limits: Mapping[str, Any], *, plain: bool) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_fitting(inner, value, key, limits, plain=plain)
    if is_dataclass(kind):
        _require(isinstance(value, Mapping), f"a group of settings: {', '.join(f.name for f in fields(kind))}")
        return (plain_settings if plain else read_settings)(kind, value, key)  # type: ignore[arg-type]
    if kind is type(None):
        _require(value is None, "null")
    elif origin is bool:
        _require(isinstance(value, bool), "true or false")
    elif origin in (int, float):
        return _number(origin, value, limits)
    elif origin is str:
        _text(value, limits)
    elif origin in (tuple, list):
        wanted = "a list, like [a, b]" if "count" not in limits else f"a list of {limits['count']} values"
        _require(isinstance(value, Sequence) and not isinstance(value, str), wanted)
        _require(len(value) == limits.get("count", len(value)), wanted)
        items = [_checked(inner[0], item, f"{key}[{place}]", limits, plain=plain) for place, item in enumerate(value)]
        return items if plain else origin(items)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _require(isinstance(value, Mapping), "a mapping, like {name: value}")
        return {str(n): _checked(inner[1], item, f"{key}.{n}", limits, plain=plain) for n, item in value.items()}
    return value


def _first_fitting(options: Sequence[Any], value: Any, key: str, limits: Mapping[str, Any], *, plain: bool) -> Any:
    wanted = []
    for option in options:
        try:
            return _converted(option, value, key, limits, plain=plain)
        except _Wrong as wrong:
            wanted.append(str(wrong))
    raise _Wrong(" or ".join(text for text in wanted if text != "null") or "null")


def _text(value: Any, limits: Mapping[str, Any]) -> None:
    words = [word for word in limits.get("choices", ()) if isinstance(word, str)]
    if words:
        _require(value in words, ", ".join(words))
    else:
        _require(isinstance(value, str) and "\0" not in value, limits.get("like", "text"))
        _require(re.fullmatch(limits.get("pattern", "(?s).*"), value) is not None, limits.get("like", "text"))


def _number(kind: type, value: Any, limits: Mapping[str, Any]) -> Any:
    bounds = [f"{sign} {limits[name]:,}" for name, sign in _LIMITS.items() if name in limits]
    wanted = f"{'a whole number' if kind is int else 'a number'} {' and '.join(bounds)}".strip()
    numbers = [word for word in limits.get("choices", ()) if not isinstance(word, str)]
    if numbers:
        wanted = ", ".join(map(str, numbers))
    right = isinstance(value, int | float) and not isinstance(value, bool)
    right = right and (isinstance(value, int) or math.isfinite(value))  # no float is as large as 10**400
    _require(right and (kind is float or value == int(value)), wanted)  # 1e6 is a whole number
    try:
        number = kind(value)
    except OverflowError:
        raise _Wrong(wanted) from None
    inside = {
        "at_least": lambda limit: number >= limit, "above": lambda limit: number > limit,
        "at_most": lambda limit: number <= limit, "below": lambda limit: number < limit,
    }  # fmt: skip
    _require(all(inside[name](limits[name]) for name in _LIMITS if name in limits), wanted)
    _require(not numbers or number in numbers, wanted)
    _require(kind is float or abs(number) < LARGEST_COUNT, f"{wanted} below 2**63")
    return number


def _require(right: bool, wanted: str) -> None:
    if not right:
        raise _Wrong(wanted)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
