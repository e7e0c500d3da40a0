"""The token store: written section after section, read as one long array of token ids in memory-mapped shards.

Each section is complete or absent, so that a kill costs at most one section. Nothing in a store depends on the number
of threads, on time, or on where an earlier build was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import explained, file_sha256, flush_folder, json_or_none, write_sorted_json
from polarlm.data.config import SPLITS
from polarlm.data.readers import Piece
from polarlm.data.source import Source, SplitPlan, SplitReader, document_key
from polarlm.data.tokenizer import Tokenizer


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


# -- writing -----------------------------------------------------------------------------------------------------------
#
# A section is about 128 MB of text, read in order; its tokens go to one shard per split. One thread reads the text and
# several tokenise it (the tokenizers release the interpreter lock), in chunks whose number in flight is bounded, so
# memory does not depend on the size of the corpus.


SECTION_BYTES = 128 << 20
CHUNK_CHARS = 2 << 20
_CHUNK_PIECES = 4096


@dataclass
class _Encoded:
    """What one chunk of pieces adds to one split."""

    tokens: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    length: int = 0
    bytes: int = 0
    unknown: int = 0
    hashes: dict[str, np.ndarray] = field(default_factory=dict)


def build_sections(
    folder: Path, source: Source, plan: SplitPlan, tokenizer: Tokenizer, progress: PrepareProgress,
    workers: int | None = None, section_bytes: int = SECTION_BYTES,
) -> list[dict[str, Any]]:  # fmt: skip
    """Write every section that is missing or damaged in `folder` and return the records of all, in order."""
    sections: list[dict[str, Any]] = []
    state: dict[str, Any] | None = None
    workers = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        while True:
            record = finished_section(folder, len(sections))
            if record is None:
                record = _build_section(
                    folder,
                    len(sections),
                    SplitReader(source, plan, state),
                    tokenizer,
                    progress,
                    pool,
                    workers,
                    section_bytes,
                )
            if record["splits"] or not sections:
                sections.append(record)
            if record["exhausted"]:
                return sections
            state = record["end"]


def finished_section(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a section whose files are all there with the right checksums, else None."""
    record = json_or_none(folder / f"section-{number:05d}.json")
    try:
        known = {"end", "exhausted", "empty_documents"} <= record.keys()
        whole = all(shard_damage(folder, shard) is None for shard in record["splits"].values())
    except (AttributeError, KeyError, TypeError):  # a damaged record
        return None
    return record if known and whole else None


def shard_damage(folder: Path, shard: dict[str, Any]) -> str | None:
    """What is wrong with a shard's files (missing, wrong checksum), or None."""
    for name, wanted in ((shard["file"], shard["sha256"]), (shard["documents_file"], shard["documents_sha256"])):
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if file_sha256(path) != wanted:
            return f"{name} does not match its checksum"
    return None


def _build_section(
    folder: Path, number: int, reader: SplitReader, tokenizer: Tokenizer, progress: PrepareProgress,
    pool: ThreadPoolExecutor, workers: int, section_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    begin_bytes = reader.state["bytes"]
    append_eos = reader.source.config.append_eos and tokenizer.eos_id is not None
    empty, exhausted = 0, True
    with contextlib.ExitStack() as stack:
        writers: dict[str, _ShardWriter] = {}

        def needed() -> int | None:
            left = progress.tokens_left()
            return None if left is None else left * tokenizer.dtype.itemsize

        def write(future: Future[dict[str, _Encoded]]) -> None:
            for split, encoded in future.result().items():
                if split not in writers:
                    writers[split] = stack.enter_context(_ShardWriter(folder, split, number, needed))
                writers[split].add(encoded)
                progress.advance(len(encoded.starts), encoded.bytes, encoded.length)

        waiting: deque[Future[dict[str, _Encoded]]] = deque()
        for chunk, size in _chunks(reader, not tokenizer.splittable, min(CHUNK_CHARS, section_bytes)):
            empty += sum(1 for piece in chunk if piece.first and piece.last and not piece.text)
            waiting.append(pool.submit(encode_chunk, chunk, tokenizer, append_eos))
            while len(waiting) > 2 * workers:
                write(waiting.popleft())
            if size - begin_bytes >= section_bytes:
                exhausted = False
                break
        while waiting:
            write(waiting.popleft())
        splits = {split: writers[split].finish() for split in SPLITS if split in writers}
    record = {"end": reader.state, "exhausted": exhausted, "empty_documents": empty, "splits": splits}
    write_sorted_json(folder / f"section-{number:05d}.json", record)
    return record


def _chunks(reader: SplitReader, whole_documents: bool, limit: int) -> Iterator[tuple[list[Piece], int]]:
    """Pieces in groups large enough to be worth a task, with the bytes read so far; ends agree with `reader.state`."""
    chunk: list[Piece] = []
    characters = 0
    for piece in reader:
        if whole_documents and not piece.first and chunk and chunk[-1].split == piece.split:
            before = chunk.pop()
            piece = Piece(before.text + piece.text, before.first, piece.last, piece.split)
        chunk.append(piece)
        characters += len(piece.text)
        complete = piece.last or not whole_documents
        if complete and reader.at_piece_end and (characters >= limit or len(chunk) >= _CHUNK_PIECES):
            yield chunk, reader.state["bytes"]
            chunk, characters = [], 0
    if chunk:
        yield chunk, reader.state["bytes"]


def encode_chunk(
    pieces: list[Piece], tokenizer: Tokenizer, append_eos: bool, hashes: bool = True
) -> dict[str, _Encoded]:
    """Tokenise some pieces and sort them by split."""
    result: dict[str, _Encoded] = {}
    kept = [piece for piece in pieces if piece.text or not piece.first]
    for piece, ids in zip(kept, tokenizer.encode_batch([piece.text for piece in kept])):
        into = result.setdefault(piece.split or "train", _Encoded())
        if piece.first:
            into.starts.append(into.length)
        if tokenizer.unknown_id is not None:
            into.unknown += int(np.count_nonzero(ids == tokenizer.unknown_id))
        into.tokens.append(ids.astype(tokenizer.dtype, copy=False))
        into.length += len(ids)
        into.bytes += len(piece.text.encode())
        if piece.last and append_eos:
            into.tokens.append(np.array([tokenizer.eos_id], tokenizer.dtype))
            into.length += 1
    for encoded in result.values():
        encoded.tokens = [np.concatenate(encoded.tokens)]
    for split, encoded in result.items() if hashes else ():
        documents, blocks = piece_hashes(piece for piece in kept if (piece.split or "train") == split)
        encoded.hashes = {"documents": documents, "paragraphs": blocks}
    return result


class _ShardWriter:
    """Appends to the files of one shard under temporary names; `finish` flushes and renames them."""

    def __init__(self, folder: Path, split: str, number: int, needed: Callable[[], int | None]):
        self.folder, self.split, self.number, self._needed = folder, split, number, needed
        stem = f"{split}-{number:05d}"
        self.names = {"tokens": f"{stem}.bin", "starts": f"{stem}.docs"}
        self.names |= {what: hash_file(folder, split, what, number).name for what in ("documents", "paragraphs")}
        self.tokens = self.documents = self.bytes = self.unknown = 0

    def __enter__(self) -> _ShardWriter:
        self._files = {what: open(self._beside(what), "wb") for what in self.names}  # noqa: SIM115
        self._digests = {what: hashlib.sha256() for what in ("tokens", "starts")}
        return self

    def __exit__(self, *error: object) -> None:
        for what, file in self._files.items():
            with contextlib.suppress(OSError):  # a full disk refuses the rest of the buffer once more
                file.close()
            self._beside(what).unlink(missing_ok=True)

    def _beside(self, what: str) -> Path:
        return self.folder / f"{self.names[what]}.tmp"

    def add(self, encoded: _Encoded) -> None:
        """Append one encoded chunk."""
        starts = np.array(encoded.starts, "<u8") + np.uint64(self.tokens)
        with explained(self.folder / self.names["tokens"], self._needed):
            for part in encoded.tokens:
                self._write("tokens", part.tobytes())
            self._write("starts", starts.tobytes())
            for what, hashes in encoded.hashes.items():
                self._files[what].write(hashes.tobytes())
        self.tokens += encoded.length
        self.documents += len(encoded.starts)
        self.bytes += encoded.bytes
        self.unknown += encoded.unknown

    def _write(self, what: str, raw: bytes) -> None:
        self._files[what].write(raw)
        self._digests[what].update(raw)

    def finish(self) -> dict[str, Any]:
        """Make the files durable under their final names and return the shard's record."""
        with explained(self.folder / self.names["tokens"], self._needed):
            for what, file in self._files.items():
                file.flush()
                os.fsync(file.fileno())
                os.replace(self._beside(what), self.folder / self.names[what])
        flush_folder(self.folder)
        return {
            "file": self.names["tokens"], "documents_file": self.names["starts"], "tokens": self.tokens,
            "documents": self.documents, "bytes": self.bytes, "unknown": self.unknown,
            "sha256": self._digests["tokens"].hexdigest(), "documents_sha256": self._digests["starts"].hexdigest(),
        }  # fmt: skip


_QUIET_SECONDS = 10.0


class PrepareProgress:
    """Documents, MB/s, tokens and time left; `advance` is called once per chunk of text."""

    def __init__(self, name: str, expected_bytes: int | None):
        self.name, self.expected = name, expected_bytes
        self.documents = self.bytes = self.tokens = 0
        self._begin = self._spoken = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PrepareProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = [TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[line]}")]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"preparing {self.name}", total=self.expected, line="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error[0] is None and (self._bar is not None or self.bytes > 50e6):
            self.expected = None  # nothing is left
            print(f"prepared {self.name}: {self.line()}", file=sys.stderr)

    def advance(self, documents: int, size: int, tokens: int) -> None:
        """Count one finished chunk."""
        self.documents += documents
        self.bytes += size
        self.tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.bytes, line=self.line())
        elif now - self._spoken > _QUIET_SECONDS:
            self._spoken = now
            print(f"preparing {self.name}: {self.line()}", file=sys.stderr, flush=True)

    def tokens_left(self) -> int | None:
        """How many more tokens the rest of the text will give, judged by what was read; None where nobody knows."""
        if not self.expected or not self.bytes:
            return None
        return int(max(self.expected - self.bytes, 0) / self.bytes * self.tokens)

    def line(self) -> str:
        """The numbers as one line of text."""
        seconds = max(time.monotonic() - self._begin, 1e-6)
        speed = self.bytes / seconds
        text = f"{self.documents:,} documents, {self.tokens:,} tokens, {speed / 1e6:.1f} MB/s"
        if self.expected and speed > 0:
            left = max(self.expected - self.bytes, 0) / speed
            text += f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"
        return text


MIN_CHARS = 64  # shorter paragraphs (headings, "Yes.") repeat without anything having leaked


def paragraphs(text: str) -> Iterable[str]:
    """Blocks between blank lines; in text whose lines are not wrapped, every line is a paragraph."""
    for block in text.split("\n\n"):
        if len(block) < MIN_CHARS:
            continue
        lines = block.split("\n")
        for paragraph in lines if len(lines) > 1 and max(map(len, lines)) > 120 else (block,):
            paragraph = paragraph.strip()
            if len(paragraph) >= MIN_CHARS:
                yield paragraph


def piece_hashes(pieces: Iterable[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """(document hashes, paragraph hashes) of some pieces, 64 bits each."""
    documents: list[int] = []
    blocks: list[bytes] = []
    for piece in pieces:
        if piece.first and not piece.text.isspace():
            documents.append(document_key(piece.text))
        blocks.extend(hashlib.blake2b(p.encode(), digest_size=8).digest() for p in paragraphs(piece.text))
    return np.array(documents, "<u8"), np.frombuffer(b"".join(blocks), "<u8")


def leakage_report(folder: Path, sections: int) -> dict[str, Any]:
    """For every evaluation split: how many of its documents and paragraphs occur verbatim in the train split."""
    report: dict[str, Any] = {}
    for split in ("val", "test"):
        for what in ("documents", "paragraphs"):
            wanted = np.concatenate([_load(folder, split, what, n) for n in range(sections)] or [np.empty(0, "<u8")])
            if len(wanted) == 0:
                continue
            unique, counts = np.unique(wanted, return_counts=True)
            hit = np.zeros(len(unique), bool)
            # One section of train at a time: memory follows the evaluation split, not the corpus.
            for number in range(sections):
                hit |= np.isin(unique, _load(folder, "train", what, number))
            entry = report.setdefault(split, {})
            entry[what] = {"checked": len(wanted), "in_train": int(counts[hit].sum())}
    return report


def hash_file(folder: Path, split: str, what: str, section: int) -> Path:
    """Where the hashes of one section wait until the whole corpus is built."""
    return folder / f"{split}-{section:05d}.{what}.hashes"


def _load(folder: Path, split: str, what: str, section: int) -> np.ndarray:
    path = hash_file(folder, split, what, section)
    return np.fromfile(path, "<u8") if path.exists() else np.empty(0, "<u8")
