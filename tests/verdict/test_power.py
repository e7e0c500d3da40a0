"""What the seeds could have shown is what simulated seeds do show."""

import numpy as np
import pytest

from polarlm.verdict.comparison import (
    NOT_SHOWN,
    adjust,
    compare_seeds,
    equivalence_power,
    power,
    seeds_to_decide,
    smallest_effect,
)
from polarlm.verdict.evidence import Evidence, evidence_of_mean
from polarlm.verdict.sentences import verdict


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_smallest_effect_is_shown_four_times_out_of_five(n):
    spread = 0.01
    effect = smallest_effect(Evidence(0.0, spread / np.sqrt(n), n - 1, n))
    rng = np.random.default_rng(n)
    shown = [evidence_of_mean(rng.normal(effect, spread, n)).p_value() < 0.05 for _ in range(1500)]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.035)


def test_power_of_equivalence_is_what_simulated_seeds_have():
    rng, spread, margin, n = np.random.default_rng(0), 0.004, 0.005, 8
    predicted = equivalence_power(0.001, margin, spread / np.sqrt(n), n - 1)
    shown = [evidence_of_mean(rng.normal(0.001, spread, n)).p_beyond(margin) < 0.05 for _ in range(1500)]
    assert np.mean(shown) == pytest.approx(predicted, abs=0.04)


def seeds_with(mean, spread, n):
    pattern = np.array([1.0, -1.0] * n)[:n]
    pattern = (pattern - pattern.mean()) / pattern.std(ddof=1)
    base = np.linspace(1.9, 2.1, n)
    ours = {s: b + mean + spread * p for s, (b, p) in enumerate(zip(base, pattern))}
    return ours, dict(enumerate(base))


def test_how_many_more_seeds_would_decide():
    ours, theirs = seeds_with(-0.01, 0.01, 4)
    comparison = adjust([compare_seeds("a", ours, "b", theirs, margin=0.001)])[0]
    assert comparison.outcome == NOT_SHOWN
    wanted = seeds_to_decide(comparison)
    assert power(0.01, 0.01 / np.sqrt(wanted), wanted - 1) >= 0.8 > power(0.01, 0.01 / np.sqrt(wanted - 1), wanted - 2)
    assert f"About {wanted - 4} more seeds would decide" in verdict(comparison, "bits per byte")


def test_more_comparisons_on_a_page_need_more_seeds():
    ours, theirs = seeds_with(-0.01, 0.01, 4)
    alone = compare_seeds("a", ours, "b", theirs, margin=0.001)
    page = adjust([alone, *(compare_seeds(name, ours, "b", theirs, margin=0.001) for name in "cdef")])
    assert [c.family for c in page] == [5] * 5
    wanted = seeds_to_decide(page[0])
    assert wanted > seeds_to_decide(adjust([alone])[0])
    chances = [power(0.01, 0.01 / np.sqrt(n), n - 1, 0.05 / 5) for n in (wanted - 1, wanted)]
    assert chances[0] < 0.8 <= chances[1]


def test_seeds_may_decide_for_equivalence_too_and_a_hopeless_case_is_said():
    ours, theirs = seeds_with(0.0001, 0.006, 4)
    assert seeds_to_decide(compare_seeds("a", ours, "b", theirs, margin=0.005)) < 25
    hopeless = compare_seeds("a", ours, "b", theirs)
    assert seeds_to_decide(hopeless) is None
    assert "More than 200 seeds" in verdict(hopeless, "bits per byte")
