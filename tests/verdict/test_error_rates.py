"""The verdict's error rates on seeds with known truth; docs/statistics.md has the same with more repetitions."""

import re

import pytest

from benchmarks.error_rates import (
    PAGE,
    documents,
    equivalence,
    family,
    looking_after_every_seed,
    one_comparison,
    shown_power,
    tables,
)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_false_positives_and_coverage_are_nominal_and_interval_and_test_agree(n):
    rates = one_comparison(n, correlation=0.5, repetitions=1200)
    assert rates["paired"] == pytest.approx(0.05, abs=0.02)
    assert rates["unpaired"] < 0.05  # shared parts of a seed make it careful
    assert rates["covered"] == pytest.approx(0.95, abs=0.02)
    assert rates["contradiction"] == 0


def test_looking_after_every_seed_keeps_the_error_rate_and_still_finds_effects():
    null = looking_after_every_seed(0.0, 600)
    assert null["fixed"] > 0.12  # why the rule exists
    assert null["always valid"] <= 0.05
    clear = looking_after_every_seed(0.03, 300)
    assert clear["always valid"] > 0.95
    assert clear["seeds"] < 7


@pytest.mark.parametrize("n", [3, 8])
def test_power_is_as_predicted(n):
    rates = shown_power(n, 1200)
    assert rates["measured"] == pytest.approx(rates["predicted"], abs=0.04)
    assert rates["measured at half"] == pytest.approx(rates["predicted at half"], abs=0.045)


def test_equivalence_is_rarely_false_and_as_powerful_as_predicted():
    for n in (3, 5):
        rates = equivalence(n, 800)
        assert rates["false"] <= 0.07
        assert rates["shown"] == pytest.approx(rates["predicted"], abs=0.05)


@pytest.mark.parametrize("effects", [(0.0,) * 4, (0.0, 0.08, 0.08), (0.08, 0.08, 0.08)])
def test_a_page_of_comparisons_has_one_error_rate_and_intervals_that_hold_together(effects):
    rates = family(effects, 5, 800)
    assert rates["wrong"] <= 0.07
    assert rates["covered"] >= 0.93


def test_seeds_and_documents_together_cover_what_seeds_alone_do_not():
    rates = documents(8, 60, 400)
    assert rates["both"] >= 0.92
    assert rates["seeds alone"] < 0.9


def test_the_page_has_a_place_for_every_table_and_each_is_filled():
    page = PAGE.read_text()
    for name in tables(80):
        place = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.S)
        assert place and place.group(1).count("\n") >= 4, name
