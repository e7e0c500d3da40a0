"""The judge must not see differences that are not there, nor miss clear ones, nor hide how it knows."""

import math

import numpy as np
import pytest
from scipy import stats

from polarlm.verdict.statistics import (
    NO_DIFFERENCE,
    Budget,
    adjust,
    budget_gaps,
    compare_seeds,
    describe_budgets,
    estimate_mean,
    holm,
    is_matched,
    verdict,
)


def losses(values, first_seed=1):
    return {first_seed + i: v for i, v in enumerate(values)}


def test_interval_of_the_mean_is_students_t():
    values = [1.90, 1.95, 1.93]
    estimate = estimate_mean(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert estimate.method == "t"
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-12)
    assert estimate.half_width == pytest.approx((high - low) / 2)


def test_bootstrap_interval_agrees_with_scipy_on_a_skewed_sample():
    sample = np.random.default_rng(3).exponential(size=25)
    estimate = estimate_mean(sample)
    theirs = stats.bootstrap((sample,), np.mean, n_resamples=20_000, method="BCa").confidence_interval
    assert estimate.method == "bootstrap"
    assert (estimate.low, estimate.high) == pytest.approx(tuple(theirs), abs=0.03)


def test_interval_covers_the_truth_as_often_as_promised():
    rng = np.random.default_rng(0)
    hits = [e.low <= 2.0 <= e.high for e in (estimate_mean(rng.normal(2.0, 0.1, size=3)) for _ in range(2000))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_no_interval_and_no_verdict():
    comparison = compare_seeds("polar", {1: 1.0}, "standard", {1: 2.0})
    assert comparison.difference.low is None
    assert comparison.p_value is None
    assert comparison.outcome == NO_DIFFERENCE
    sentence = verdict(comparison, "bits per byte")
    assert NO_DIFFERENCE in sentence
    assert "one shared seed has no interval" in sentence


def test_pairing_finds_what_the_spread_between_seeds_hides():
    baseline = losses([2.00, 2.20, 2.40])
    treatment = losses([1.97, 2.168, 2.371])
    paired = compare_seeds("polar", treatment, "standard", baseline)
    assert paired.difference.method == "paired t"
    assert paired.p_value == pytest.approx(stats.ttest_rel(list(treatment.values()), list(baseline.values())).pvalue)
    assert paired.outcome == "better"
    unpaired = compare_seeds("polar", losses(treatment.values(), first_seed=11), "standard", baseline)
    assert unpaired.difference.method == "Welch t"
    assert unpaired.outcome == NO_DIFFERENCE
    assert "not paired" in verdict(unpaired, "bits per byte")


def test_only_shared_seeds_are_paired():
    comparison = compare_seeds("a", {1: 1.0, 2: 1.1, 3: 9.0}, "b", {1: 1.2, 2: 1.31, 4: 0.1})
    assert comparison.seeds == (1, 2)
    assert comparison.difference.mean == pytest.approx(-0.205)


def test_equal_blocks_are_rarely_called_different():
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        baseline = losses(rng.normal(2, 0.05, 4))
        family = adjust([compare_seeds(f"b{k}", losses(rng.normal(2, 0.05, 4)), "s", baseline) for k in range(4)])
        wrong += any(c.outcome != NO_DIFFERENCE for c in family)
    assert wrong / 300 < 0.08  # the error rate of the whole family, not of each comparison


def test_clear_differences_are_named_in_both_directions():
    base = losses([2.00, 2.01, 1.99])
    worse = compare_seeds("xsa", losses([2.10, 2.115, 2.092]), "standard", base)
    assert worse.outcome == "worse"
    assert verdict(worse, "bits per byte").startswith("xsa: worse than standard, higher by 0.1")


def test_many_seeds_use_bootstrap_and_sign_flips():
    rng = np.random.default_rng(2)
    base = rng.normal(2, 0.1, 12)
    comparison = compare_seeds("polar", losses(base - 0.02 + rng.normal(0, 0.005, 12)), "standard", losses(base))
    assert comparison.difference.method == "bootstrap"
    assert comparison.outcome == "better"
    assert comparison.p_value < 0.01


def test_holm_against_a_hand_computed_example():
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_correction_can_take_a_verdict_back():
    base = losses([2.00, 2.10, 2.20])
    close_call = compare_seeds("a", losses([1.960, 2.052, 2.175]), "s", base)
    assert close_call.outcome == "better"
    noise = [compare_seeds(n, losses([2.01, 2.07, 2.22]), "s", base) for n in "bcd"]
    corrected = adjust([close_call, *noise])[0]
    assert corrected.outcome == NO_DIFFERENCE
    assert "Holm over 4 comparisons" in verdict(corrected, "bits per byte")


def test_a_diverged_seed_is_named_and_forbids_a_win():
    base = losses([2.00, 2.01, 1.99])
    diverged = compare_seeds("polar", {1: 1.80, 2: 1.812, 3: math.nan}, "standard", base)
    assert diverged.p_value < 0.05
    assert diverged.outcome == NO_DIFFERENCE
    assert "1 failed or diverged seed of polar" in verdict(diverged, "bits per byte")


def test_identical_seeds_are_not_repetitions():
    comparison = compare_seeds("a", losses([1.5, 1.5, 1.5]), "b", losses([1.6, 1.6, 1.6]))
    assert comparison.outcome == NO_DIFFERENCE
    assert "not repetitions" in verdict(comparison, "bits per byte")


def test_no_finite_result_is_said():
    comparison = compare_seeds("a", {1: math.nan}, "b", {1: 1.0})
    assert "no finite result" in verdict(comparison, "bits per byte")


@pytest.mark.parametrize(
    ("treatment", "matched", "words"),
    [
        (Budget(1_010_000, 5e6, 3.01e13), True, "Matched: parameters, tokens, FLOPs."),
        (Budget(1_000_000, 5e6, 3.6e13), True, "Not matched: FLOPs +20.0 %."),
        (Budget(1_500_000, 5e6, 3e13), True, "Not matched: parameters +50.0 %."),
        (Budget(1_500_000, 5e6, 4e13), False, "not a comparison of blocks alone"),
        (Budget(1_000_000, 5e6, None), True, "Unknown: FLOPs."),
    ],
)
def test_budgets_are_named(treatment, matched, words):
    gaps = budget_gaps(treatment, Budget(1_000_000, 5e6, 3e13))
    assert is_matched(gaps) is matched
    assert words in describe_budgets(gaps)
