"""Schedules are functions of tokens, refuse what can't be, and are found by their yaml."""

import math

import pytest

from polarlm.errors import UserError
from polarlm.training.schedules import Constant, Cosine, Linear, WarmupStableDecay, build_schedule


def test_cosine_rises_linearly_peaks_after_warmup_and_ends_at_the_final_factor():
    schedule = Cosine(warmup_fraction=0.1, final_factor=0.2)
    factors = [schedule.factor(tokens, 1000) for tokens in (50, 100, 325, 550, 1000, 5000)]
    assert factors == pytest.approx([0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2, 0.2])


def test_wsd_is_flat_then_falls_in_a_straight_line():
    schedule = WarmupStableDecay(warmup_tokens=100, decay_fraction=0.2)
    assert schedule.factor(100, 1000) == schedule.factor(799, 1000) == 1.0
    assert schedule.factor(900, 1000) == pytest.approx(0.5)
    assert schedule.factor(1000, 1000) == 0.0


def test_the_square_root_decay_falls_steeply_first_and_reaches_zero():
    schedule = WarmupStableDecay(warmup_tokens=0, decay_fraction=0.5, shape="sqrt")
    assert schedule.factor(500, 1000) == 1.0
    assert schedule.factor(625, 1000) == pytest.approx(0.5)  # a quarter of the way: 1 − √(1/4)
    assert schedule.factor(1000, 1000) == 0.0


def test_linear_decays_to_zero_at_the_last_token_from_the_end_of_the_warm_up():
    schedule = Linear(warmup_fraction=0.2)
    factors = [schedule.factor(tokens, 1000) for tokens in (100, 200, 600, 1000)]
    assert factors == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_the_curve_depends_on_tokens_and_not_on_the_batch_size():
    coarse = [Cosine().factor(step * 1024, 8192) for step in range(1, 9)]
    fine = [Cosine().factor(step * 256, 8192) for step in range(1, 33)]
    assert coarse == fine[3::4]


def test_a_run_without_warmup_starts_at_the_peak():
    assert Constant(warmup_fraction=0.0).factor(0, 100) == 1.0


@pytest.mark.parametrize(
    ("schedule", "total", "word"),
    [
        (Cosine(), 0, "max_steps"),
        (Cosine(warmup_tokens=20), 10, "warm-up"),
        (Cosine(final_factor=-3), 10, "final_factor"),
        (WarmupStableDecay(warmup_tokens=5, decay_fraction=0.9), 10, "decay_fraction"),
        (WarmupStableDecay(shape="round"), 10, "shape"),
    ],
)
def test_impossible_schedules_are_refused_with_the_key_to_change(schedule, total, word):
    with pytest.raises(UserError, match=word):
        schedule.check(total)


def test_a_schedule_is_built_from_what_its_yaml_names_and_nothing_else():
    section = {"_target_": "polarlm.training.schedules.Linear", "final_factor": 0.25}
    assert build_schedule(section, 10) == Linear(final_factor=0.25)
    with pytest.raises(UserError, match=r"os\.system"):
        build_schedule({"_target_": "os.system", "command": "true"}, 10)
    with pytest.raises(UserError, match="finale"):
        build_schedule({"_target_": section["_target_"], "finale": 1}, 10)


def test_factors_are_finite_and_never_above_one():
    for schedule in (Cosine(), WarmupStableDecay(), Constant(), Linear(), WarmupStableDecay(shape="sqrt")):
        values = [schedule.factor(t, 777) for t in range(0, 900, 7)]
        assert all(math.isfinite(v) and 0 <= v <= 1 for v in values)
