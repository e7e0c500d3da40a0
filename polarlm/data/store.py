"""Reading a prepared corpus: memory-mapped shards of token ids that behave like one long array."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np


class TokenStore:
    """The tokens of one split: `len`, slices, windows, document starts, and exactly how many bytes they stand for."""

    def __init__(self, folder: str | Path, split: str, summary: dict[str, Any], dtype: str):
        self.folder, self.split, self.summary, self._dtype = Path(folder), split, summary, np.dtype(dtype)
        self.shards: list[dict[str, Any]] = summary["shards"]
        self._offsets = [0]
        for shard in self.shards:
            self._offsets.append(self._offsets[-1] + shard["tokens"])
        self._maps: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files itself instead of receiving their content.
        return self.__dict__ | {"_maps": {}}

    @property
    def documents(self) -> int:
        """Number of documents that begin in this split."""
        return self.summary["documents"]

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens (end-of-text tokens have none)."""
        return self.summary["bytes"]

    @property
    def bytes_per_token(self) -> float:
        """Exact: bits per byte = loss in nats per token / ln 2 / bytes_per_token."""
        return self.bytes / max(len(self), 1)

    @property
    def fingerprint(self) -> str:
        """Changes when any token changes."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self.shards).encode()).hexdigest()

    def __getitem__(self, window: slice) -> np.ndarray:
        """Tokens [a:b] in the stored type; a view where the window lies in one shard."""
        begin, end, step = window.indices(len(self))
        if step != 1:
            raise ValueError("a token store is read in steps of 1")
        if end <= begin:
            return np.empty(0, self._dtype)
        first = bisect_right(self._offsets, begin) - 1
        if end <= self._offsets[first + 1]:
            return self._tokens(first)[begin - self._offsets[first] : end - self._offsets[first]]
        parts = []
        while begin < end:
            stop = min(end, self._offsets[first + 1])
            parts.append(self._tokens(first)[begin - self._offsets[first] : stop - self._offsets[first]])
            begin, first = stop, first + 1
        return np.concatenate(parts)

    def windows(self, begins: np.ndarray, length: int) -> np.ndarray:
        """(len(begins), length) int64: one window of consecutive tokens from every given position."""
        rows = np.empty((len(begins), length), np.int64)
        for row, begin in zip(rows, begins.tolist()):
            row[:] = self[begin : begin + length]
        return rows

    def document_starts(self, begin: int, end: int) -> np.ndarray:
        """Positions in [begin, end) at which a document begins."""
        parts = []
        for number in range(max(bisect_right(self._offsets, begin) - 1, 0), len(self.shards)):
            offset = self._offsets[number]
            if offset >= end:
                break
            starts = self._mapped(self.shards[number]["documents_file"], np.dtype("<u8"))
            low, high = np.searchsorted(starts, [max(begin - offset, 0), end - offset])
            parts.append(starts[low:high].astype(np.int64) + offset)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def document_ids(self, begin: int, length: int) -> np.ndarray:
        """(length,) ids counting documents from 0 within the window [begin, begin + length)."""
        ids = np.zeros(length, np.int64)
        starts = self.document_starts(begin + 1, begin + length)
        ids[starts - begin] = 1
        return np.cumsum(ids)

    def _tokens(self, number: int) -> np.ndarray:
        return self._mapped(self.shards[number]["file"], self._dtype)

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._maps:
            path = self.folder / name
            # As a plain array: slicing np.memmap's subclass costs more than reading the window.
            whole = np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
            self._maps[name] = whole
        return self._maps[name]
