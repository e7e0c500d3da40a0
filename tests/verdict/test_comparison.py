"""A comparison must not see differences that are not there, nor miss clear ones, nor hide how it knows."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from polarlm.verdict.comparison import BETTER, EQUIVALENT, NOT_SHOWN, WORSE, adjust, compare_seeds, holm
from polarlm.verdict.evidence import Evidence, estimate_mean, evidence_of_gap, evidence_of_mean, sign_flip_p
from polarlm.verdict.sentences import verdict


def losses(values, first_seed=1):
    return {first_seed + i: v for i, v in enumerate(values)}


@pytest.mark.parametrize("n", [3, 12, 40])
def test_interval_of_the_mean_is_students_t_for_any_number_of_seeds(n):
    values = np.random.default_rng(n).normal(1.9, 0.02, n)
    estimate = estimate_mean(values)
    low, high = stats.t.interval(0.95, n - 1, np.mean(values), stats.sem(values))
    assert estimate.method == "t"
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-12)
    assert estimate.half_width == pytest.approx((high - low) / 2)


def test_perplexity_has_its_interval_in_log_space():
    loss = [3.1, 3.3, 3.6]
    perplexity, of_loss = estimate_mean(np.exp(loss), log=True), estimate_mean(loss)
    shown = (perplexity.mean, perplexity.low, perplexity.high)
    assert shown == pytest.approx([math.exp(x) for x in (of_loss.mean, of_loss.low, of_loss.high)])


def test_an_interval_holds_exactly_what_its_test_does_not_reject():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 8, 12):
        for always_valid in (False, True):
            evidence = evidence_of_mean(rng.normal(0.02, 0.02, n), always_valid)
            for alpha in (0.05, 0.0125):
                for end in evidence.interval(alpha):
                    if math.isfinite(end):
                        assert evidence.p_value(end) == pytest.approx(alpha)
                    else:
                        assert evidence.p_value(1e9) > alpha


def test_the_paired_test_is_students_and_the_unpaired_one_is_welchs():
    rng = np.random.default_rng(1)
    a, b = rng.normal(2, 0.1, 5), rng.normal(2.1, 0.03, 5)
    assert evidence_of_mean(a - b).p_value() == pytest.approx(stats.ttest_rel(a, b).pvalue)
    welch = stats.ttest_ind(a, b, equal_var=False)
    gap = evidence_of_gap(a, b)
    assert gap.p_value() == pytest.approx(welch.pvalue)
    assert gap.interval() == pytest.approx(tuple(welch.confidence_interval(0.95)))


def test_sign_flips_are_counted_on_both_sides():
    """A one-sided count would halve p and turn a gain of 6 pairs of 6 from 0.031 into 0.016."""
    differences = np.array([-0.01, -0.03, -0.02, -0.015, -0.04, -0.022])
    flips = [np.dot(signs, differences) for signs in itertools.product((-1, 1), repeat=6)]
    by_hand = np.mean([abs(flip) >= abs(differences.sum()) - 1e-12 for flip in flips])
    assert sign_flip_p(differences) == pytest.approx(by_hand) == pytest.approx(2 / 64)
    assert sign_flip_p(-differences) == pytest.approx(2 / 64)


def test_one_seed_has_no_interval_and_no_verdict():
    comparison = compare_seeds("polar", {1: 1.0}, "standard", {1: 2.0})
    assert comparison.difference.low is None
    assert comparison.p_value is None
    assert comparison.outcome == NOT_SHOWN
    assert "one shared seed has no interval" in verdict(comparison, "bits per byte")


def test_pairing_finds_what_the_spread_between_seeds_hides_and_both_tests_are_printed():
    baseline = losses([2.00, 2.20, 2.40])
    treatment = losses([1.97, 2.168, 2.371])
    paired = compare_seeds("polar", treatment, "standard", baseline)
    ours, theirs = list(treatment.values()), list(baseline.values())
    assert paired.p_value == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert paired.p_unpaired == pytest.approx(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)
    assert paired.correlation == pytest.approx(np.corrcoef(ours, theirs)[0, 1])
    assert paired.outcome == BETTER
    sentence = verdict(paired, "bits per byte")
    assert "unpaired p = 0.8" in sentence and "the seeds' losses correlate by +1" in sentence
    unpaired = compare_seeds("polar", losses(ours, first_seed=11), "standard", baseline)
    assert unpaired.difference.method == "Welch t"
    assert unpaired.outcome == NOT_SHOWN
    assert "not paired" in verdict(unpaired, "bits per byte")


def test_only_shared_seeds_are_paired():
    comparison = compare_seeds("a", {1: 1.0, 2: 1.1, 3: 9.0}, "b", {1: 1.2, 2: 1.31, 4: 0.1})
    assert comparison.seeds == (1, 2)
    assert comparison.difference.mean == pytest.approx(-0.205)


def test_clear_differences_are_named_in_both_directions():
    base = losses([2.00, 2.01, 1.99])
    worse = compare_seeds("xsa", losses([2.10, 2.115, 2.092]), "standard", base)
    assert worse.outcome == WORSE
    assert verdict(worse, "bits per byte").startswith("xsa: worse than standard, higher by 0.1")


def test_of_a_number_that_should_be_high_the_higher_is_better():
    base, more = losses([0.50, 0.51, 0.49]), losses([0.60, 0.615, 0.592])
    assert compare_seeds("a", more, "b", base, lower_is_better=False).outcome == BETTER
    assert compare_seeds("b", base, "a", more, lower_is_better=False).outcome == WORSE


def test_a_diverged_seed_is_named_and_forbids_a_win():
    base = losses([2.00, 2.01, 1.99])
    diverged = compare_seeds("polar", {1: 1.80, 2: 1.812, 3: math.nan}, "standard", base)
    assert diverged.p_value < 0.05
    assert diverged.outcome == NOT_SHOWN
    assert "1 failed or diverged seed of polar" in verdict(diverged, "bits per byte")


def test_worse_is_not_claimed_against_a_baseline_that_diverged():
    diverged = compare_seeds("polar", losses([2.00, 2.01, 1.99]), "standard", {1: 1.80, 2: 1.812, 3: math.nan})
    assert diverged.p_value < 0.05
    assert diverged.outcome == NOT_SHOWN
    assert "1 failed or diverged seed of standard" in verdict(diverged, "bits per byte")
    # A baseline that lost seeds may still be beaten.
    beaten = compare_seeds("polar", losses([1.80, 1.812, 1.79]), "standard", {1: 2.0, 2: 2.01, 3: math.nan, 4: 1.99})
    assert beaten.outcome == BETTER


def test_identical_seeds_are_not_repetitions():
    comparison = compare_seeds("a", losses([1.5, 1.5, 1.5]), "b", losses([1.6, 1.6, 1.6]))
    assert comparison.outcome == NOT_SHOWN
    assert "not repetitions" in verdict(comparison, "bits per byte")


def test_no_finite_result_is_said():
    comparison = compare_seeds("a", {1: math.nan}, "b", {1: 1.0})
    assert "no finite result" in verdict(comparison, "bits per byte")


def test_equivalence_is_two_one_sided_tests():
    differences = np.array([0.0008, -0.0011, 0.0004, -0.0002, 0.0009])
    evidence, margin = evidence_of_mean(differences), 0.005
    sides = [
        stats.ttest_1samp(differences, -margin, alternative="greater").pvalue,
        stats.ttest_1samp(differences, margin, alternative="less").pvalue,
    ]
    assert evidence.p_beyond(margin) == pytest.approx(max(sides))
    base = np.array([2.0, 2.02, 1.99, 2.01, 2.0])
    comparison = compare_seeds("a", losses(base + differences), "b", losses(base), margin=margin)
    assert comparison.outcome == EQUIVALENT
    assert "no difference from b larger than 0.005 bits per byte" in verdict(comparison, "bits per byte")
    wide = compare_seeds("a", losses(base + 10 * differences), "b", losses(base), margin=margin)
    assert wide.outcome == NOT_SHOWN
    assert Evidence(0.006, 0.001, 4, 5).p_beyond(margin) == 1.0
    lost = compare_seeds("a", losses([*(base + differences), math.nan]), "b", losses([*base, 2.0]), margin=margin)
    assert lost.outcome == NOT_SHOWN


def test_claims_of_equivalence_share_one_error_rate():
    """Each alone would be called equivalent at 5 %; three on one page are not, and none of them is p-hacked in."""
    base, margin = np.array([2.0, 2.02, 1.99, 2.01, 2.0]), 0.005
    differences = np.array([0.004, -0.0035, 0.0045, -0.004, 0.002])
    alone = [compare_seeds(name, losses(base + differences), "b", losses(base), margin=margin) for name in "acd"]
    p = alone[0].evidence.p_beyond(margin)
    assert 0.05 / 3 < p < 0.05 and {c.outcome for c in alone} == {EQUIVALENT}
    together = adjust(alone)
    assert [c.p_equivalent for c in together] == pytest.approx([3 * p] * 3)
    assert {c.outcome for c in together} == {NOT_SHOWN}


def test_a_difference_smaller_than_the_margin_is_called_both():
    base = np.array([2.0, 2.02, 1.99, 2.01, 2.0])
    treatment = losses(base - 0.002 + 0.0002 * np.array([1, -1, 0, 1, -1]))
    comparison = compare_seeds("a", treatment, "b", losses(base), margin=0.005)
    assert comparison.outcome == BETTER
    assert "within the margin of 0.005" in verdict(comparison, "bits per byte")


def test_holm_against_a_hand_computed_example():
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_correction_can_take_a_verdict_back():
    base = losses([2.00, 2.10, 2.20])
    close_call = compare_seeds("a", losses([1.960, 2.052, 2.175]), "s", base)
    assert close_call.outcome == BETTER
    noise = [compare_seeds(n, losses([2.01, 2.07, 2.22]), "s", base) for n in "bcd"]
    corrected = adjust([close_call, *noise])[0]
    assert corrected.outcome == NOT_SHOWN
    assert "Holm over 4 comparisons" in verdict(corrected, "bits per byte")


def test_simultaneous_intervals_and_holms_verdicts_never_contradict_each_other():
    rng = np.random.default_rng(5)
    kinds = set()
    for _ in range(200):
        base = rng.normal(2, 0.02, 5)
        effects = rng.choice([0, 0, -0.03, 0.05], size=3)
        ours = [losses(base + effect + rng.normal(0, 0.012, 5)) for effect in effects]
        family = adjust([compare_seeds(str(k), values, "s", losses(base)) for k, values in enumerate(ours)])
        undecided = sum(not c.is_shown for c in family)
        for c in family:
            low, high = c.simultaneous
            assert low <= c.difference.mean <= high
            assert c.is_shown == (low >= 0 or high <= 0)
            kinds.add((c.is_shown, undecided > 0))
            if not c.is_shown:
                assert (low, high) == pytest.approx(c.evidence.interval(0.05 / undecided))
    assert kinds == {(True, True), (True, False), (False, True)}


def test_seeds_added_after_looking_are_judged_by_the_always_valid_rule():
    base = np.array([2.0, 2.05, 1.96, 2.01, 1.99])
    treatment = base - 0.02 + 0.01 * np.array([1.2, -1, 0.3, -1.1, 0.6])
    fixed = compare_seeds("a", losses(treatment), "b", losses(base))
    looked = compare_seeds("a", losses(treatment), "b", losses(base), looks=(3, 4))
    assert fixed.outcome == BETTER
    assert looked.outcome == NOT_SHOWN
    assert looked.p_value > fixed.p_value
    assert looked.difference.half_width > fixed.difference.half_width
    assert "added after looking at 3 and 4" in verdict(looked, "bits per byte")


def test_with_a_plan_looking_costs_nothing_but_gives_no_verdict_before_its_end():
    base, better = losses([2.0, 2.01, 1.99]), losses([1.9, 1.912, 1.885])
    early = compare_seeds("a", better, "b", base, planned=5)
    assert early.outcome == NOT_SHOWN
    assert "3 of 5 planned seeds" in verdict(early, "bits per byte")
    assert compare_seeds("a", better, "b", base, looks=(2,), planned=3).outcome == BETTER
    assert compare_seeds("a", better, "b", base, planned=2).looks == (2,)  # seeds beyond the plan
