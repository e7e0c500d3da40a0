"""Sequences that begin where a document begins: whole documents packed together instead of a stream cut anywhere.

Documents longer than the context are cut into chunks of it. `aligned` fills sequences with consecutive chunks in
corpus order; `best_fit` (best-fit decreasing, "Fewer Truncations Improve Language Modeling", Ding et al. 2024) puts
every chunk where it leaves least room. What stays empty is padded and ignored by the loss.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polarlm.data.order import EpochOrder, require_length
from polarlm.data.store import TokenStore
from polarlm.ignored import IGNORED

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
