"""Documents are samples too: intervals over documents, and over seeds and documents together, cover the truth."""

import numpy as np
import pytest

from polarlm.errors import UserError
from polarlm.verdict.per_document import compare_documents, compare_seeds_and_documents


def test_two_checkpoints_differ_by_the_ratio_of_sums_with_an_interval_over_documents():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        sizes = rng.integers(50, 2000, 80).astype(float)
        theirs = sizes * rng.normal(1.4, 0.1, 80)
        ours = theirs - sizes * rng.normal(0.01, 0.03, 80)
        estimate = compare_documents(ours, theirs, sizes)
        assert estimate.mean == pytest.approx((ours.sum() - theirs.sum()) / sizes.sum())
        covered.append(estimate.low <= -0.01 <= estimate.high)
    assert 0.85 <= np.mean(covered) <= 1.0
    assert compare_documents([1.0], [1.2], [10]).low is None


@pytest.mark.parametrize(("seed_spread", "document_spread"), [(0.01, 0.0), (0.0, 0.06), (0.01, 0.06)])
def test_seeds_and_documents_are_two_levels(seed_spread, document_spread):
    """Neither seeds nor documents alone may make the interval: with three seeds it is as wide as three seeds are."""
    rng = np.random.default_rng(1)
    seeds, documents, covered = 3, 60, []
    for _ in range(400):
        sizes = rng.integers(50, 500, documents).astype(float)
        effect = -0.005 + seed_spread * rng.normal(size=(seeds, 1)) + document_spread * rng.normal(size=documents)
        differences = sizes * (effect + 0.05 * rng.normal(size=(seeds, documents)))
        evidence = compare_seeds_and_documents(differences, np.zeros_like(differences), sizes)
        low, high = evidence.interval()
        covered.append(low <= -0.005 <= high)
    assert 0.92 <= np.mean(covered) <= 0.995


def test_where_only_seeds_differ_the_error_is_that_of_the_seeds():
    sizes = np.array([100.0, 300.0, 50.0, 250.0])
    per_byte = np.array([-0.02, 0.01, 0.04])
    evidence = compare_seeds_and_documents(per_byte[:, None] * sizes, np.zeros((3, 4)), sizes)
    assert evidence.mean == pytest.approx(0.01)
    assert evidence.error == pytest.approx(per_byte.std(ddof=1) / np.sqrt(3))


def test_losses_of_other_documents_are_refused():
    with pytest.raises(UserError, match="do not belong together"):
        compare_documents(np.ones(3), np.ones(4), np.ones(3))
    with pytest.raises(UserError, match="at least two seeds"):
        compare_seeds_and_documents(np.ones((1, 4)), np.ones((1, 4)), np.ones(4))
