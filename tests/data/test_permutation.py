import numpy as np
import pytest

from polarlm.data.order import Permutation, key


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 4097])
def test_every_index_is_visited_exactly_once(size: int) -> None:
    assert sorted(Permutation(size, key(7, 0))(np.arange(size)).tolist()) == list(range(size))


def test_the_same_key_gives_the_same_order_and_another_key_another() -> None:
    first = Permutation(1000, key(1, 0))(np.arange(1000))
    assert (Permutation(1000, key(1, 0))(np.arange(1000)) == first).all()
    assert (Permutation(1000, key(1, 1))(np.arange(1000)) != first).mean() > 0.9


def test_any_part_of_the_order_can_be_computed_alone() -> None:
    whole = Permutation(999, 5)(np.arange(999))
    assert (Permutation(999, 5)(np.array([998, 3, 500])) == whole[[998, 3, 500]]).all()


def test_ten_billion_elements_need_no_memory() -> None:
    images = Permutation(10**10, 3)(np.arange(10**9, 10**9 + 100_000))
    assert images.min() >= 0 and images.max() < 10**10 and len(np.unique(images)) == 100_000
    # Spread over the whole range: the mean of uniform numbers, within five standard errors.
    assert abs(images.mean() / 10**10 - 0.5) < 5 / np.sqrt(12 * 100_000)


def test_neighbours_do_not_stay_neighbours() -> None:
    images = Permutation(100_000, 11)(np.arange(100_000))
    assert (np.abs(np.diff(images)) <= 10).mean() < 0.001
