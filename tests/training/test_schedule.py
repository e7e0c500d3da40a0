import math

import pytest

from polarlm.errors import UserError
from polarlm.training.schedule import learning_rate_factor


def test_cosine_rises_linearly_peaks_after_warmup_and_ends_at_the_final_factor():
    factor = learning_rate_factor("cosine", 1000, warmup_fraction=0.1, final_factor=0.2)
    assert factor(50) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(1.0)
    assert factor(550) == pytest.approx(0.6)
    assert factor(1000) == pytest.approx(0.2)
    assert factor(5000) == pytest.approx(0.2)


def test_wsd_is_flat_then_falls_in_a_straight_line():
    factor = learning_rate_factor("wsd", 1000, warmup_tokens=100, decay_fraction=0.2, final_factor=0.0)
    assert factor(100) == factor(799) == 1.0
    assert factor(900) == pytest.approx(0.5)
    assert factor(1000) == 0.0


def test_the_curve_depends_on_tokens_and_not_on_the_batch_size():
    factor = learning_rate_factor("cosine", 8192)
    coarse = [factor(step * 1024) for step in range(1, 9)]
    fine = [factor(step * 256) for step in range(1, 33)]
    assert coarse == fine[3::4]


def test_a_run_without_warmup_starts_at_the_peak():
    assert learning_rate_factor("constant", 100, warmup_fraction=0.0)(0) == 1.0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kind": "cosin", "total_tokens": 10}, "cosin"),
        ({"kind": "cosine", "total_tokens": 0}, "max_steps"),
        ({"kind": "cosine", "total_tokens": 10, "warmup_tokens": 20}, "warm-up"),
        ({"kind": "wsd", "total_tokens": 10, "warmup_tokens": 5, "decay_fraction": 0.9}, "decay_fraction"),
    ],
)
def test_impossible_schedules_are_refused_with_the_key_to_change(options, word):
    with pytest.raises(UserError, match=word):
        learning_rate_factor(**options)


def test_factor_is_finite_and_never_above_one():
    for kind in ("cosine", "wsd", "constant"):
        factor = learning_rate_factor(kind, 777)
        values = [factor(t) for t in range(0, 900, 7)]
        assert all(math.isfinite(v) and 0 <= v <= 1 for v in values)
