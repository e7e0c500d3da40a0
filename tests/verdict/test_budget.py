"""Equal budgets are recognised, unequal ones are named; gains are read off the reference's own learning curve."""

import math

import numpy as np
import pytest

from polarlm.verdict.budget import (
    PROCESSOR,
    Budget,
    LossCurve,
    budget_gaps,
    cost_at,
    describe_budgets,
    gains,
    is_fair,
    unfair_reason,
)
from polarlm.verdict.comparison import BETTER, NOT_SHOWN, WORSE


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


def curve(offset=0.0, slow=1.0, noise=0.0, seed=0, points=40):
    """Loss falls with the logarithm of tokens; FLOPs and seconds grow with them."""
    tokens = np.linspace(1e5, 4e6, points)
    losses = 3.0 - 0.2 * np.log(tokens / 1e5) + offset + noise * np.random.default_rng(seed).normal(size=points)
    return LossCurve({"tokens": tokens, "FLOPs": 6e6 * tokens, "seconds": slow * tokens / 1e4}, losses)


def test_a_loss_inside_the_curve_is_interpolated_and_one_below_it_extrapolated_up_to_a_limit():
    reference = curve()
    at_half = 3.0 - 0.2 * math.log(20)
    assert cost_at(reference, "tokens", at_half) == pytest.approx(2e6, rel=0.01)
    assert cost_at(reference, "tokens", reference.losses[-1] - 0.2 * math.log(2)) == pytest.approx(8e6, rel=0.01)
    assert cost_at(reference, "tokens", 0.1) == pytest.approx(4 * 4e6)
    assert cost_at(reference, "tokens", 9.0) is None
    assert cost_at(reference, "metres", at_half) is None


def test_a_curve_is_continued_along_its_last_half_alone():
    """It falls by 0.4 per e-fold up to half of its cost and by 0.1 after: only the later slope may be continued."""
    tokens = np.linspace(1e5, 4e6, 40)
    log = np.log(tokens / 2e6)
    broken = LossCurve({"tokens": tokens}, np.where(log < 0, 2.0 - 0.4 * log, 2.0 - 0.1 * log))
    assert cost_at(broken, "tokens", broken.losses[-1] - 0.1 * math.log(2)) == pytest.approx(8e6, rel=0.01)


def test_two_validations_are_a_curve_and_one_is_none():
    halves = LossCurve({"tokens": np.array([250.0, 500.0])}, np.array([3.0, 2.8]))
    assert cost_at(halves, "tokens", 2.9) == pytest.approx(math.sqrt(250 * 500))
    assert cost_at(halves, "tokens", 2.7) == pytest.approx(500 * math.sqrt(2))
    assert cost_at(LossCurve({"tokens": np.array([500.0])}, np.array([2.8])), "tokens", 2.7) is None


def test_a_curve_that_rose_again_has_nevertheless_been_there():
    steps = np.arange(1.0, 9.0)
    rose = LossCurve({"tokens": steps}, np.array([3.0, 2.5, 2.0, 1.5, 1.6, 1.7, 1.8, 1.9]))
    assert cost_at(rose, "tokens", 1.5) == pytest.approx(4.0)
    assert cost_at(rose, "tokens", 1.75) == pytest.approx(math.sqrt(3 * 4))


def test_the_gain_of_a_slow_but_better_block_is_weakest_in_seconds():
    ours = {s: curve(offset=-0.04, slow=1.5, noise=0.002, seed=s) for s in range(4)}
    theirs = {s: curve(noise=0.002, seed=10 + s) for s in range(4)}
    results = gains(ours, theirs, range(4))
    assert results[0].currency == "seconds"
    by_name = {gain.currency: gain for gain in results}
    # 0.04 lower on a slope of 0.2 per log token is worth exp(0.2) = 1.22 times the tokens.
    assert by_name["tokens"].factor.mean == pytest.approx(math.exp(0.2), rel=0.03)
    assert by_name["tokens"].outcome == by_name["FLOPs"].outcome == BETTER
    assert by_name["seconds"].factor.mean == pytest.approx(math.exp(0.2) / 1.5, rel=0.03)
    assert by_name["seconds"].outcome == WORSE


def test_seconds_are_processor_seconds_where_every_run_knows_them():
    def busy(slow, seed):
        # A neighbour made the time that passed meaningless; the processor's own time is not touched by it.
        made = curve(slow=slow, noise=0.002, seed=seed)
        clock = made.costs["seconds"]
        noise = 1 + 5 * np.random.default_rng(seed).random()
        return LossCurve({**made.costs, "seconds": noise * clock, PROCESSOR: clock}, made.losses)

    ours, theirs = {s: busy(2.0, s) for s in range(3)}, {s: busy(1.0, 10 + s) for s in range(3)}
    by_name = {gain.currency: gain for gain in gains(ours, theirs, range(3))}
    assert set(by_name) == {"tokens", "FLOPs", PROCESSOR}
    assert by_name[PROCESSOR].factor.mean == pytest.approx(0.5, rel=0.03) and by_name[PROCESSOR].outcome == WORSE
    unknown = LossCurve({**theirs[1].costs, PROCESSOR: np.full(40, np.nan)}, theirs[1].losses)
    assert {gain.currency for gain in gains(ours, theirs | {1: unknown}, range(3))} == {"tokens", "FLOPs", "seconds"}


def test_equal_blocks_gain_nothing():
    ours = {s: curve(noise=0.01, seed=s) for s in range(5)}
    theirs = {s: curve(noise=0.01, seed=50 + s) for s in range(5)}
    assert {gain.outcome for gain in gains(ours, theirs, range(5))} == {NOT_SHOWN}
