"""Training on text that does not fit on the disk: read, split, tokenised and cut into windows as it comes.

The limits of this mode: the order of sequences is the order of the source (no shuffling, an epoch is a repetition);
one process (training/job.py refuses more); going back, as a resumed run does, means reading again from the nearest
remembered place (the index beside the store); documents cannot be packed.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.order import mask_borders
from polarlm.data.source import Source, SplitPlan, SplitReader
from polarlm.data.store import encode_chunk
from polarlm.data.tokenizer import Tokenizer
from polarlm.errors import UserError

_REMEMBER_EVERY = 1 << 20  # tokens between the remembered places


class StreamingSequences:
    """Sequence n is tokens [n·T, n·T + T] of the endless train stream; cheap going forward, re-read going back."""

    def __init__(
        self,
        source: Source,
        plan: SplitPlan,
        tokenizer: Tokenizer,
        context: int,
        index: Path,
        mask_documents: bool = False,
    ):
        if plan.rule == "position":
            raise UserError(
                "data.streaming=true needs data.split.rule=own or hash; a stream has no known end to split at."
            )
        self.source, self.plan, self.tokenizer = source, plan, tokenizer
        self.context, self.index, self.mask = context, index, mask_documents
        self._go_to(0)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence; reads ahead and keeps what it has read for `rows`."""
        if not self.mask:
            return np.full(len(numbers), self.context)
        if len(numbers):
            self._read_until(int(numbers.min()) * self.context, int(numbers.max() + 1) * self.context + 1)
        starts = np.concatenate([at + starts for at, _, starts in self._blocks])
        first = np.searchsorted(starts, numbers * self.context, "right")
        return self.context - (np.searchsorted(starts, (numbers + 1) * self.context, "right") - first)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        rows, ids = [], []
        for number in numbers.tolist():
            begin = number * self.context
            self._read_until(begin, begin + self.context + 1)
            blocks = [block for block in self._blocks if block[0] <= begin + self.context]
            tokens = np.concatenate([block for _, block, _ in blocks])
            offset = begin - self._begin
            rows.append(tokens[offset : offset + self.context + 1].astype(np.int64))
            starts = np.concatenate([at + starts for at, _, starts in blocks])
            borders = starts[(starts > begin) & (starts <= begin + self.context)] - begin
            marks = np.zeros(self.context + 1, np.int64)
            marks[borders] = 1
            ids.append(np.cumsum(marks))
        window, documents = np.stack(rows), np.stack(ids)
        if not self.mask:
            return window[:, :-1], window[:, 1:], None
        return window[:, :-1], mask_borders(window[:, 1:], documents), documents[:, :-1]

    def _read_until(self, begin: int, end: int) -> None:
        """Hold the tokens [begin, end); what lies before them is forgotten."""
        if begin < self._begin or begin > self._end + 4 * _REMEMBER_EVERY:
            self._go_to(begin)
        while self._end < end:
            self._read_more()
            self._drop_before(begin)
        self._drop_before(begin)

    def _go_to(self, position: int) -> None:
        place: dict[str, Any] = {"tokens": 0, "state": None}
        for line in self.index.read_text(errors="replace").splitlines() if self.index.exists() else []:
            try:
                remembered = json.loads(line)
                if place["tokens"] < remembered["tokens"] <= position and remembered["state"]["piece"] >= 0:
                    place = remembered
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a killed run
        # Blocks are (first token's position, tokens, document starts within).
        self._blocks: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self._begin = self._end = self._remembered = place["tokens"]
        self._start(place["state"])

    def _start(self, state: dict[str, Any] | None) -> None:
        self._reader = SplitReader(self.source, self.plan, state)
        self._pieces = iter(self._reader)
        self._fruitless = state is None

    def _drop_before(self, position: int) -> None:
        while self._blocks and self._blocks[0][0] + len(self._blocks[0][1]) <= position:
            self._blocks.popleft()
        self._begin = self._blocks[0][0] if self._blocks else self._end

    def _read_more(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            if self._fruitless:
                raise UserError(f"data={self.source.config.name}: the stream has no text to train on.")
            self._start(None)
            return
        if piece.split == "train" and piece.text:
            self._fruitless = False
            encoded = encode_chunk([piece], self.tokenizer, self._append_eos, hashes=False)["train"]
            block = encoded.tokens[0]
            self._blocks.append((self._end, block, np.array(encoded.starts, np.int64)))
            self._end += len(block)
        if self._end >= self._remembered + _REMEMBER_EVERY and self._reader.at_piece_end:
            self._remembered = self._end
            # Where nothing can be written (a read-only cache), a resumed run reads from the beginning.
            with contextlib.suppress(OSError), open(self.index, "a") as file:
                file.write(json.dumps({"tokens": self._end, "state": self._reader.state}) + "\n")

    @property
    def _append_eos(self) -> bool:
        return self.source.config.append_eos and self.tokenizer.eos_id is not None
