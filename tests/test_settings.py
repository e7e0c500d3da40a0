"""The schema helper: a wrong setting is named with what is allowed, a right one arrives with its type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from polarlm.errors import UserError
from polarlm.settings import read_settings, setting


@dataclass(frozen=True)
class Inner:
    share: float = setting(0.5, at_least=0, below=1)


@dataclass(frozen=True)
class Outer:
    count: int = setting(3, at_least=1, at_most=1_000_000)
    rate: float = setting(0.1, above=0)
    switch: bool = False
    kind: str = setting("plain", choices=("plain", "fancy"))
    path: str | None = None
    limit: int | None = setting(None, at_least=2)
    names: tuple[str, ...] = ("a",)
    weights: Mapping[str, float] | None = setting(None, above=0)
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cont": 1}, "x.cont is not an option. Did you mean count?"),
        ({"zzz": 1}, "x.zzz is not an option. Options: count, rate, switch, kind, path, limit, names, weights, inner."),
        ({"inner": {"shares": 1}}, "x.inner.shares is not an option. Did you mean share?"),
        ({"inner": 3}, "x.inner=3 must be a group of settings: share."),
        ({"inner": {"share": 1.0}}, "x.inner.share=1.0 must be a number ≥ 0 and < 1."),
        ({"count": 1.5}, "x.count=1.5 must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"count": True}, "x.count=True must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"count": "many"}, "x.count='many' must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"count": 0}, "x.count=0 must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"count": 10**7}, "x.count=10000000 must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"count": float("nan")}, "x.count=nan must be a whole number ≥ 1 and ≤ 1,000,000."),
        ({"rate": 0}, "x.rate=0 must be a number > 0."),
        ({"rate": float("inf")}, "x.rate=inf must be a number > 0."),
        ({"switch": "maybe"}, "x.switch='maybe' must be true or false."),
        ({"switch": 1}, "x.switch=1 must be true or false."),
        ({"kind": "fency"}, "x.kind='fency' is not allowed. Did you mean fancy? Choose one of plain, fancy."),
        ({"path": 3}, "x.path=3 must be text."),
        ({"limit": 1}, "x.limit=1 must be a whole number ≥ 2."),
        ({"names": "abc"}, "x.names='abc' must be a list, like [a, b]."),
        ({"names": [1]}, "x.names[0]=1 must be text."),
        ({"weights": 3}, "x.weights=3 must be a mapping, like {name: value}."),
        ({"weights": {"a": 0}}, "x.weights.a=0 must be a number > 0."),
        ([1], "x=[1] must be a group of settings: count, rate, switch, kind, path, limit, names, weights, inner."),
    ],
)
def test_a_wrong_setting_is_one_sentence(given: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(Outer, given, "x")
    assert str(refused.value) == message


def test_right_settings_arrive_with_their_types_and_missing_ones_as_defaults() -> None:
    given = {"count": 1e3, "rate": 1, "names": ["p", "q"], "weights": {"a": 2}, "inner": {"share": 0}, "path": None}
    read = read_settings(Outer, given, "x")
    assert read == Outer(count=1000, rate=1.0, names=("p", "q"), weights={"a": 2.0}, inner=Inner(0.0))
    assert isinstance(read.count, int) and isinstance(read.rate, float)
