"""A random permutation of any size that needs no memory: a keyed Feistel network with cycle walking."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_U = np.uint64
_ALL = 2**64 - 1


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        z = np.asarray(value, _U) + _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
        return z ^ (z >> _U(31))


def key(*numbers: int) -> int:
    """One 64-bit key of several integers, in order (for example seed, epoch, purpose)."""
    state = 0
    for number in numbers:
        # `mix` on plain integers: a hundred times faster for a single number.
        state = ((state ^ number) + 0x9E3779B97F4A7C15) & _ALL
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _ALL
        state ^= state >> 31
    return state


class Permutation:
    """A bijection of 0 … size−1 chosen by a key; maps any indices, in any order, without storing anything."""

    def __init__(self, size: int, chosen_by: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half, self._mask = _U(half), _U((1 << half) - 1)
        self._keys = [_U(key(chosen_by, number)) for number in range(_ROUNDS)]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The images of the given indices."""
        result = self._network(np.asarray(indices, _U))
        # The network permutes 2^(2·half) ≥ size numbers; walking its cycle until inside stays a bijection.
        outside = result >= _U(self.size)
        while outside.any():
            result[outside] = self._network(result[outside])
            outside = result >= _U(self.size)
        return result.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._half, numbers & self._mask
        for round_key in self._keys:
            left, right = right, left ^ (mix(right ^ round_key) & self._mask)
        return (left << self._half) | right
