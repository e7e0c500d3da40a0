"""Local text of any shape: .txt, .jsonl, .parquet, .arrow, each also compressed; a file, a folder or a glob."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polarlm.data.atomic import explained, file_sha256
from polarlm.data.config import DataConfig
from polarlm.data.expansion import Expanded, allowed_bytes, allowed_in_memory, require_allowed
from polarlm.data.read.documents import (
    LARGEST_DOCUMENT,
    Piece,
    documents_by_heading,
    documents_by_separator,
    pieces_of,
    require_short,
)
from polarlm.errors import UserError

COMPRESSED = (".gz", ".xz", ".zst", ".zip")
TEXT, ROWS, TABLES = (".txt", ".md", ".rst", ".raw", ".tokens"), (".jsonl", ".ndjson", ".json"), (".parquet", ".arrow")
_SPLIT_NAMES = {"train": "train|training", "val": "valid|validation|val|dev", "test": "test"}
_BLOCK = 1 << 20
# Up to here a file is identified by its content, above by size, time and both ends: hashing 100 GB takes minutes.
_HASH_WHOLE = 64 << 20
_TOO_FAR = (
    "If you trust it, unpack it and give the result as data.path (a table: write it without compression), or set "
    "data.max_bytes to at least that size."
)


def find_files(path: str) -> list[Path]:
    """The files meant by a path, folder or glob, in a fixed order; refuses what does not exist or has no text in it."""
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        files = [p for p in given.rglob("*") if p.is_file() and _shape(p)[0] in TEXT + ROWS + TABLES]
        if not files:
            raise UserError(
                f"data.path={path} is a folder without text files. Allowed: {' '.join(TEXT + ROWS + TABLES)}, "
                f"each also with {' '.join(COMPRESSED)}."
            )
        return sorted(files)
    files = [Path(p) for p in glob.glob(str(given), recursive=True) if Path(p).is_file()]
    if not files:
        raise UserError(
            f"data.path={path} does not exist (looked in {Path.cwd()}). Give a file, a folder or a glob such as "
            "'texts/**/*.txt'; without files of your own, data=pydocs works everywhere."
        )
    return sorted(files)


def _shape(path: Path) -> tuple[str, str]:
    """(suffix of the content, suffix of the compression or '')."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1] if suffixes else ""), packed


def split_of(path: Path, root: Path) -> str | None:
    """The split a file's name or folder speaks of (train.txt, data/validation-00000.parquet, test/a.txt), if any."""
    inside = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    for split, words in _SPLIT_NAMES.items():
        if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", str(inside).lower()):
            return split
    return None


@dataclass(frozen=True)
class FileUnit:
    """One file as a stream of document pieces; reading it twice gives the same pieces."""

    path: Path
    name: str
    split: str | None
    config: DataConfig

    def fingerprint(self) -> str:
        """Changes when the file's content changes."""
        stat = self.path.stat()
        if stat.st_size <= _HASH_WHOLE:
            return file_sha256(self.path)
        with open(self.path, "rb") as file:
            head = file.read(_BLOCK)
            file.seek(-_BLOCK, io.SEEK_END)
            return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode() + head + file.read()).hexdigest()

    def size_hint(self) -> int | None:
        """Bytes of text in the file as far as its size tells; for compressed files the usual ratio of its format."""
        kind, packed = _shape(self.path)
        usual = {"": 1.0, ".gz": 2.8, ".xz": 3.5, ".zst": 3.2, ".zip": 2.8}[packed] * (
            2.0 if kind == ".parquet" else 1.0
        )
        return int(self.path.stat().st_size * usual)

    def pieces(self) -> Iterator[Piece]:
        """Every document of the file, in order, as bounded pieces."""
        kind, heading, where = _shape(self.path)[0], self.config.document_start, f"A document in {self.path}"
        if kind in ROWS or kind in TABLES:
            rows = self._json_rows() if kind in ROWS else self._table_rows(kind)
            documents = documents_by_heading(rows, heading, where) if heading else rows
        elif self.config.document_separator:
            documents = documents_by_separator(self._blocks(), self.config.document_separator, where)
        elif heading:
            documents = documents_by_heading(self._lines(), heading, where)
        else:
            yield from pieces_of(self._blocks())
            return
        for text in documents:
            yield from pieces_of([text])

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with contextlib.ExitStack() as stack:
                packed = _shape(self.path)[1]
                file = self._unpacked(stack, packed)
                if packed:
                    file = io.BufferedReader(Expanded(file, self.path, self._allowed(), _TOO_FAR), _BLOCK)
                yield file
        except (UserError, UnicodeDecodeError):
            raise
        except _unreadable() as error:
            raise UserError(f"{self.path} cannot be read to its end ({error}); is the file complete?") from None

    def _allowed(self) -> int:
        return allowed_bytes(self.path, self.config.max_bytes)

    def _unpacked(self, stack: contextlib.ExitStack, packed: str) -> IO[bytes]:
        file: Any
        if packed == ".gz":
            import gzip

            file = gzip.open(self.path, "rb")  # noqa: SIM115  (the stack closes it)
        elif packed == ".xz":
            import lzma

            file = lzma.open(self.path, "rb")  # noqa: SIM115
        elif packed == ".zst":
            import zstandard

            raw = stack.enter_context(open(self.path, "rb"))  # noqa: SIM115
            file = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
        elif packed == ".zip":
            import zipfile

            archive = stack.enter_context(zipfile.ZipFile(self.path))
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) != 1:
                raise UserError(f"{self.path} holds {len(members)} files; unpack it and give the folder as data.path.")
            require_allowed(self.path, members[0].file_size, self._allowed(), _TOO_FAR)
            file = archive.open(members[0])
        else:
            file = open(self.path, "rb")  # noqa: SIM115
        return stack.enter_context(file)

    @contextlib.contextmanager
    def _text(self) -> Iterator[io.TextIOWrapper]:
        newline = None if self.config.newlines == "lf" else ""
        with self._open() as raw:
            wrapped = io.TextIOWrapper(raw, encoding="utf-8-sig", errors=self.config.errors, newline=newline)
            try:
                yield wrapped
            except UnicodeDecodeError as error:
                raise UserError(self._not_utf8(error)) from None

    def _not_utf8(self, error: UnicodeDecodeError) -> str:
        with self._open() as raw:
            head = raw.read(2)
        utf16 = head in (b"\xff\xfe", b"\xfe\xff")
        return (
            f"{self.path} is not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason}). "
            f"{'It begins like UTF-16' if utf16 else 'It may be Latin-1 or not text at all'}; convert it, for example "
            f"`iconv -f {'UTF-16' if utf16 else 'LATIN1'} -t UTF-8`, or set data.errors=replace to put � in place of "
            "what cannot be read."
        )

    def _blocks(self) -> Iterator[str]:
        with self._text() as text:
            while block := text.read(_BLOCK):
                yield block

    def _lines(self) -> Iterator[str]:
        with self._text() as text:
            for number in itertools.count(1):
                line = text.readline(LARGEST_DOCUMENT)
                require_short(len(line), f"{self.path} line {number}", "Divide it into shorter lines.")
                if not line:
                    return
                yield line

    def _json_rows(self) -> Iterator[str]:
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            where = f"{self.path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = " (one JSON object per line is expected, not one big array)" if line.lstrip()[0] == "[" else ""
                raise UserError(f"{where} is not JSON: {getattr(error, 'msg', error)}{hint}.") from None
            if not isinstance(row, dict) or self.config.column not in row:
                keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise UserError(f"{where} has no key {self.config.column!r} (it has: {keys}); set data.column.")
            yield checked_text(row[self.config.column], where, self.config)

    def _table_rows(self, kind: str) -> Iterator[str]:
        from polarlm.data.read.tables import column_values

        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._open())
            if _shape(self.path)[1]:
                # Tables are read by jumping about: a compressed one is unpacked to a temporary file first.
                spool = stack.enter_context(tempfile.TemporaryFile())
                with explained(Path(tempfile.gettempdir()) / self.path.name):
                    shutil.copyfileobj(file, spool, _BLOCK)
                spool.seek(0)
                file = spool
            # A batch of a .arrow file is unpacked at once, a row group of a .parquet file page by page.
            limit = allowed_in_memory if kind == ".arrow" else allowed_bytes
            refuse = functools.partial(require_allowed, self.path, what_to_do=_TOO_FAR)
            require = functools.partial(refuse, allowed=limit(self.path, self.config.max_bytes))
            allowed, size = self._allowed(), 0
            for number, value in enumerate(column_values(file, kind, self.path, self.config.column, require)):
                text = checked_text(value, f"{self.path} row {number}", self.config)
                size += len(text)
                refuse(size, allowed=allowed)
                yield text


def _unreadable() -> tuple[type[Exception], ...]:
    # Every library of compression has its own kind of error for a file that is not what its name says.
    import lzma
    import zipfile
    import zlib

    import zstandard

    return EOFError, OSError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error, zstandard.ZstdError


def checked_text(value: Any, where: str, config: DataConfig) -> str:
    """The text of one row; a missing value is an empty document, half a surrogate pair is not UTF-8."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {config.column!r} holds {type(value).__name__}, not text; set data.column.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if config.errors == "strict":
            raise UserError(
                f"{where}: the text is not valid Unicode ({error.reason}); set data.errors=replace."
            ) from None
        return value.encode("utf-8", config.errors).decode()
    return value.replace("\r\n", "\n") if config.newlines == "lf" and "\r" in value else value


def file_units(path: str, config: DataConfig) -> list[FileUnit]:
    """The files of data.path as units of reading, each with the split its name speaks of."""
    root = Path(path).expanduser()
    root = root if root.is_dir() else Path(str(root).split("*")[0]).parent
    files = find_files(path)
    units = []
    for file in files:
        name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name
        name = os.fsencode(name).decode(errors="backslashreplace")  # a name need not be UTF-8
        units.append(FileUnit(file, name, split_of(file, root) if len(files) > 1 else None, config))
    return units
