"""How a call is cut into chunks of queries, and the scratch memory that the chunks share."""

from __future__ import annotations

import torch
from torch import Tensor

ALL = slice(None)
CHUNK = 64  # queries at a time: more wastes work above the diagonal, fewer starve the matrix products
CHUNK_SCORES = 2**21  # scores at a time (8 MB): fewer calls cost more in cache misses than they save


class Plan:
    """How one call is cut into chunks, with scratch memory that all chunks share."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.batch, self.heads, self.queries, self.size = q.shape
        self.groups, self.keys = k.shape[1:3]
        self.chunk = min(CHUNK, self.queries)
        self.rows = max(1, min(self.batch, CHUNK_SCORES // (self.heads * self.chunk * self.keys)))
        self.work = q.numel() * self.keys  # multiply-adds of all dot products
        self.like = q

    def __iter__(self):
        """Yields (batch rows, queries, number of keys), the longest chunks first."""
        for row in range(0, self.batch, self.rows):
            rows = slice(row, min(row + self.rows, self.batch))
            for start in reversed(range(0, self.queries, self.chunk)):
                stop = min(start + self.chunk, self.queries)
                yield rows, slice(start, stop), self.keys - self.queries + stop

    def scratch(self, copies: int = 1, extra_rows: int = 0) -> Tensor:
        return self.like.new_empty(copies * self.rows * self.heads * (self.chunk + extra_rows) * self.keys)

    def scores_view(self, scratch: Tensor, rows: slice, queries: slice, keys: int) -> Tensor:
        shape = (rows.stop - rows.start, self.heads, queries.stop - queries.start, keys)
        return scratch[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)


def same_document(documents: Tensor | None, rows: slice, queries: slice, keys: int, total: int) -> Tensor | None:
    if documents is None:
        return None
    first = documents.shape[1] - total
    ids = documents[rows]
    return ids[:, first + queries.start : first + queries.stop, None] == ids[:, None, :keys]


def part(x: Tensor | None, *where: slice) -> Tensor | None:
    """A copy of a slice: a compiled loop then has one layout to handle, also where the slice is everything."""
    return None if x is None else x.detach()[where].clone(memory_format=torch.contiguous_format)
