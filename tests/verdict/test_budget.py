"""Equal budgets are recognised, unequal ones are named, and a width that makes them equal is found or refused."""

import pytest

from polarlm.errors import UserError
from polarlm.verdict.budget import (
    Budget,
    budget_gaps,
    describe_budgets,
    is_fair,
    match_steps,
    match_width,
    unfair_reason,
)


@pytest.mark.parametrize(
    ("treatment", "fair", "words"),
    [
        (Budget(1_010_000, 5e6, 3.01e13, 60), True, "Equal: parameters, tokens, FLOPs."),
        (Budget(1_000_000, 5e6, 3.6e13, 60), True, "Not equal: FLOPs +20.0 %, seconds +20.0 %."),
        (Budget(1_500_000, 5e6, 3e13, 60), True, "Not equal: parameters +50.0 %, seconds +20.0 %."),
        (Budget(1_500_000, 4e6, 4e13, 50), True, "Equal: seconds."),
        (Budget(1_500_000, 5e6, 4e13, 60), False, "Not equal: parameters +50.0 %, FLOPs +33.3 %, seconds +20.0 %."),
        (Budget(1_000_000, 1e7, 6e13, 100), False, "Not equal: tokens +100.0 %"),
        (Budget(1_000_000, 5e6, None, None), True, "Unknown: FLOPs, seconds."),
        (Budget(), True, "Unknown: parameters, tokens, FLOPs, seconds."),
    ],
)
def test_budgets_are_named(treatment, fair, words):
    gaps = budget_gaps(treatment, Budget(1_000_000, 5e6, 3e13, 50))
    assert is_fair(gaps) is fair
    assert words in describe_budgets(gaps)
    if not fair:
        assert "match=parameters" in unfair_reason(gaps)


def transformer(width, extra=0):
    """Parameters of four layers of d 128 with a gated feed-forward of this width."""
    return 4 * (4 * 128 * 128 + 3 * 128 * width + extra) + 4096 * 128


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_width_found_is_the_nearest_one_and_within_half_a_percent(multiple):
    target = transformer(344)
    match = match_width(lambda width: transformer(width, extra=20_000), target, what="parameters", multiple=multiple)
    assert match.value % multiple == 0
    assert abs(match.gap) <= 0.005
    assert match.cost == transformer(match.value, extra=20_000)
    nearest = min(range(multiple, 600, multiple), key=lambda w: abs(transformer(w, extra=20_000) - target))
    assert match.value == nearest


def test_equal_blocks_keep_their_width():
    assert match_width(transformer, transformer(344), what="parameters").value == 344


def test_what_cannot_be_matched_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"match=parameters: with a feed-forward width of only 8 .* fewer layers"):
        match_width(lambda w: transformer(w, extra=10**6), transformer(344), what="parameters", multiple=8)
    with pytest.raises(UserError, match=r"match=flops: the nearest .* width, \d+, gives .* allowed are ±0.5 %"):
        match_width(transformer, transformer(344) * 1.02, what="flops", multiple=256)


def test_steps_are_found_for_equal_seconds():
    match = match_steps(seconds_per_step=0.11, target_seconds=100.0)
    assert match.value == 909
    assert abs(match.gap) <= 0.005
    with pytest.raises(UserError, match="match=seconds: 3 steps take"):
        match_steps(0.3, 1.0)
