"""Which sequence comes when: an endless line of training sequences, a pure function of (seed, number)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from polarlm.errors import UserError
from polarlm.ignored import IGNORED

if TYPE_CHECKING:
    from polarlm.data.store import TokenStore

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


_BLOCK = 4096  # permuted places are computed at most so many at a time; a memo, not a state


class Sequences(Protocol):
    """An endless, randomly addressable line of training sequences."""

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None), each (len(numbers), context) int64, of the given sequence numbers."""
        ...

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """(len(numbers),) int64: how many targets of each sequence are not IGNORED, without reading its tokens."""
        ...


class EpochOrder:
    """Sequence number → (epoch, place): every epoch visits all places once, in an order of its own."""

    def __init__(self, per_epoch: int, seed: int):
        self.per_epoch, self.seed = per_epoch, seed
        self._size = min(max(8 * per_epoch, 64), _BLOCK)
        self._block: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and places of the given sequence numbers."""
        epochs, places = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        blocks = numbers // self._size
        for block in dict.fromkeys(blocks.tolist()):
            inside = blocks == block
            _, known_epochs, known_places = self._permuted(block)
            epochs[inside], places[inside] = (
                known[numbers[inside] % self._size] for known in (known_epochs, known_places)
            )
        return epochs, places

    def _permuted(self, block: int) -> tuple[int, np.ndarray, np.ndarray]:
        if self._block[0] != block:
            numbers = np.arange(block * self._size, (block + 1) * self._size)
            epochs, places = numbers // self.per_epoch, numbers % self.per_epoch
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                places[inside] = Permutation(self.per_epoch, key(self.seed, int(epoch)))(places[inside])
            self._block = (block, epochs, places)
        return self._block


def mask_borders(targets: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Targets (B, T) with those ignored that belong to another document than their token; ids (B, T+1)."""
    return np.where(ids[:, 1:] == ids[:, :-1], targets, IGNORED)


def require_length(store: TokenStore, context: int) -> None:
    """Refuse a context that the split cannot fill even once."""
    if len(store) < context + 1:
        raise UserError(
            f"model.context={context} is longer than the {store.split} split ({len(store)} tokens; context + 1 are "
            f"needed). Set model.context to at most {max(len(store) - 1, 1)} or give more text."
        )


class WindowSequences:
    """Windows of the concatenated documents; every epoch visits all of them, in a new order and at a new phase."""

    def __init__(self, store: TokenStore, context: int, seed: int, mask_documents: bool = False):
        require_length(store, context)
        self.store, self.context, self.seed, self.mask = store, context, seed, mask_documents
        self.order = EpochOrder((len(store) - 1) // context, seed)

    def begins(self, numbers: np.ndarray) -> np.ndarray:
        """First token of each sequence."""
        epochs, places = self.order(numbers)
        phases = {epoch: key(self.seed, epoch, 1) % self.context for epoch in dict.fromkeys(epochs.tolist())}
        shifts = np.array([phases[epoch] for epoch in epochs.tolist()])
        # The last window of a shifted epoch would run over the end: it is moved back instead.
        return np.minimum(places * self.context + shifts, len(self.store) - 1 - self.context)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence: all, or all but those that begin another document."""
        if not self.mask:
            return np.full(len(numbers), self.context)
        begins = self.begins(numbers).tolist()
        return np.array([self.context - len(self.store.document_starts(b + 1, b + 1 + self.context)) for b in begins])

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        begins = self.begins(numbers)
        window = self.store.windows(begins, self.context + 1)
        if not self.mask:
            return window[:, :-1], window[:, 1:], None
        ids = np.stack([self.store.document_ids(begin, self.context + 1) for begin in begins.tolist()])
        return window[:, :-1], mask_borders(window[:, 1:], ids), ids[:, :-1]


_PERIOD = 1 << 12  # in every so many sequences the proportions are exact (to one sequence)


class MixtureSequences:
    """Sequence number → corpus and number within it, a pure function of (seed, number)."""

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float], seed: int):
        self.parts, self.seed = parts, seed
        shares = np.asarray(weights, float) / np.sum(weights) * _PERIOD
        # Largest remainders: whole numbers of sequences that add up to the period.
        self.quotas = np.floor(shares).astype(np.int64)
        for part in np.argsort(-(shares - self.quotas), kind="stable")[: _PERIOD - int(self.quotas.sum())]:
            self.quotas[part] += 1
        self._owner = np.repeat(np.arange(len(parts)), self.quotas)
        self._first = np.cumsum(self.quotas) - self.quotas
        self._period: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # a memo, not a state

    def where(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(part, number within that part's own line) of every sequence number."""
        periods, places = numbers // _PERIOD, numbers % _PERIOD
        slots = np.empty(len(numbers), np.int64)
        for period in dict.fromkeys(periods.tolist()):
            inside = periods == period
            if self._period[0] != period:
                self._period = (period, Permutation(_PERIOD, key(self.seed, period, 2))(np.arange(_PERIOD)))
            slots[inside] = self._period[1][places[inside]]
        owners = self._owner[slots]
        return owners, periods * self.quotas[owners] + slots - self._first[owners]

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence."""
        owners, within = self.where(numbers)
        counts = np.zeros(len(numbers), np.int64)
        for part in dict.fromkeys(owners.tolist()):
            counts[owners == part] = self.parts[part].counted(within[owners == part])
        return counts

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        owners, within = self.where(numbers)
        results: list[tuple[np.ndarray, ...]] = [()] * len(numbers)
        for part in dict.fromkeys(owners.tolist()):
            inside = np.flatnonzero(owners == part)
            part_rows = self.parts[part].rows(within[inside])
            for row, place in enumerate(inside.tolist()):
                results[place] = tuple(array[row] for array in part_rows if array is not None)
        columns = [np.stack(column) for column in zip(*results)]
        return columns[0], columns[1], columns[2] if len(columns) == 3 else None


# -- packing: sequences that begin where a document begins, instead of a stream cut anywhere ---------------------------
#
# Documents longer than the context are cut into chunks of it. `aligned` fills sequences with consecutive chunks in
# corpus order; `best_fit` (best-fit decreasing, "Fewer Truncations Improve Language Modeling", Ding et al. 2024) puts
# every chunk where it leaves least room. What stays empty is padded and ignored by the loss.


_CHUNKS_AT_ONCE = 1 << 16  # packed together; bounds memory and time whatever the size of the corpus
# Of every chunk its first token, its tokens, and how many of them have a target; of every sequence its first chunk.
_ARRAYS = ("begins", "lengths", "targets", "sequences")


class PackedSequences:
    """Packed sequences in an order that is a function of (seed, epoch); the plan is made once and memory-mapped."""

    def __init__(
        self, store: TokenStore, context: int, seed: int, packing: str, mask_documents: bool = False, padding: int = 0
    ):
        require_length(store, context)
        self.store, self.context, self.mask, self.padding = store, context, mask_documents, padding
        self._begins, self._lengths, self._targets, self._sequences = packing_plan(store, context, packing)
        self.order = EpochOrder(len(self._sequences) - 1, seed)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence."""
        _, places = self.order(numbers)
        spans = ((int(self._sequences[place]), int(self._sequences[place + 1])) for place in places.tolist())
        return np.array([self._targets[first:last].sum(dtype=np.int64) for first, last in spans], np.int64)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        _, places = self.order(numbers)
        shape = (len(numbers), self.context)
        tokens, targets = np.full(shape, self.padding, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, place in enumerate(places.tolist()):
            at = 0
            chunks = range(int(self._sequences[place]), int(self._sequences[place + 1]))
            for number, chunk in enumerate(chunks):
                begin, length, known = (int(a[chunk]) for a in (self._begins, self._lengths, self._targets))
                text = self.store[begin : begin + known + 1].astype(np.int64)
                tokens[row, at : at + length] = text[:length]
                targets[row, at : at + known] = text[1:]
                documents[row, at : at + length] = number
                at += length
            documents[row, at:] = len(chunks)
        return tokens, targets, documents if self.mask else None


def packing_plan(store: TokenStore, context: int, packing: str) -> list[np.ndarray]:
    """The arrays of _ARRAYS, memory-mapped from beside the store; made if missing, and kept if that can be written."""
    folder = Path(store.folder) / "packed" / f"{store.split}-{packing}-{context}-{store.fingerprint[:12]}"
    kept = _kept(folder, len(store))
    if kept is not None:
        return kept
    arrays = _plan(store, context, packing)
    with contextlib.suppress(OSError):  # where the cache is read-only or full, every run makes its plan anew
        _keep(folder, arrays)
    return _kept(folder, len(store)) or arrays  # mapped, so that workers share it


def _kept(folder: Path, tokens: int) -> list[np.ndarray] | None:
    """A plan that was made before; None if there is none or it is damaged."""
    try:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS]
    except (OSError, ValueError, EOFError):
        return None
    begins, lengths, targets, sequences = arrays
    whole = len(begins) == len(lengths) == len(targets) == sequences[-1] and lengths.sum(dtype=np.int64) == tokens
    return arrays if whole else None


def _keep(folder: Path, arrays: list[np.ndarray]) -> None:
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(parents=True)
        for name, array in zip(_ARRAYS, arrays):
            np.save(beside / f"{name}.npy", array)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.rename(beside, folder)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _plan(store: TokenStore, context: int, packing: str) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[], [], [], []]
    offset = 0
    for begins, lengths, targets in _chunks(store, context):
        bins = _in_order(lengths, context) if packing == "aligned" else _best_fit(lengths, context)
        order = np.concatenate([np.array(b, np.int64) for b in bins])
        counts = np.array([len(b) for b in bins])
        parts[0].append(begins[order])
        parts[1].append(lengths[order].astype(np.int32))
        parts[2].append(targets[order].astype(np.int32))
        parts[3].append(offset + np.concatenate([[0], np.cumsum(counts)[:-1]]))
        offset += len(order)
    parts[3].append(np.array([offset]))
    return [np.concatenate(arrays) for arrays in parts]


def _chunks(store: TokenStore, context: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(begins, lengths, targets) of documents cut into at most `context` tokens, some ten thousand at once."""
    starts = store.document_starts(0, len(store))
    if len(starts) == 0 or starts[0] != 0:
        starts = np.concatenate([[0], starts])
    ends = np.append(starts[1:], len(store))
    counts = -(-(ends - starts) // context)
    limits = np.cumsum(counts)
    first = 0
    while first < len(starts):
        done = limits[first - 1] if first else 0
        last = max(int(np.searchsorted(limits, done + _CHUNKS_AT_ONCE, "right")), first + 1)
        number = counts[first:last]
        within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        begins = np.repeat(starts[first:last], number) + within * context
        left = np.repeat(ends[first:last], number) - begins
        lengths = np.minimum(left, context)
        targets = np.minimum(left - 1, context)  # nothing follows the last token of a document
        yield begins[left > 0], lengths[left > 0], targets[left > 0]
        first = last


def _in_order(lengths: np.ndarray, context: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for chunk, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = context
        bins[-1].append(chunk)
        room -= length
    return bins


def _best_fit(lengths: np.ndarray, context: int) -> list[list[int]]:
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set while some bin has room r: the best fit is the lowest set bit from `length` on
    for chunk in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[chunk])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            chosen, room = len(bins), context
            bins.append([])
        bins[chosen].append(chunk)
        left = room - length
        if left:
            by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins
