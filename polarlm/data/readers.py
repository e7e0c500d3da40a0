"""Files of text as documents: text, .jsonl, .csv, tables and saved datasets, each a stream of bounded pieces."""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polarlm.data.atomic import Expanded, allowed_bytes, allowed_in_memory, explained, file_sha256, require_allowed
from polarlm.data.config import DataConfig
from polarlm.errors import UserError

PIECE_CHARS = 1 << 20
# Characters of a line or document that is held in memory whole; a file that is one document has no such limit.
LARGEST_DOCUMENT = 1 << 30
# A byte-level BPE never merges across (letter, space), whatever its pre-tokeniser's expression: encoding the two sides
# apart gives the ids of the whole.
_SAFE = re.compile(r"[A-Za-z](?= )")
# Good enough for GPT-2's expression, where a token never continues from a visible character into white space.
_NEARLY_SAFE = re.compile(r"\S(?=\s)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text of one document; `first` and `last` say whether it begins and ends that document."""

    text: str
    first: bool = True
    last: bool = True
    split: str | None = None


def cut_point(text: str, limit: int) -> int:
    """The last index in the second half of `text[:limit]` where cutting does not change any token, else `limit`."""
    for boundary in (_SAFE, _NEARLY_SAFE):
        # Look at growing tails: the boundary is nearly always within the last line.
        for tail in (256, 8192, limit // 2):
            begin = max(limit - tail, limit // 2)
            ends = [match.end() for match in boundary.finditer(text, begin, limit)]
            if ends:
                return ends[-1]
    return limit


def pieces_of(blocks: Iterable[str], limit: int = PIECE_CHARS) -> Iterator[Piece]:
    """Cut one document, given as consecutive blocks of text, into pieces of at most `limit` characters."""
    waiting, first = "", True
    for block in blocks:
        waiting += block
        while len(waiting) > limit:
            cut = cut_point(waiting, limit)
            yield Piece(waiting[:cut], first=first, last=False)
            waiting, first = waiting[cut:], False
    yield Piece(waiting, first=first, last=True)


def require_short(length: int, where: str, what_to_do: str) -> None:
    """Refuse a line or document that is too long to be held in memory whole."""
    if length >= LARGEST_DOCUMENT:
        raise UserError(
            f"{where} has {length:,} characters or more; allowed are fewer than {LARGEST_DOCUMENT:,}, because it is "
            f"held in memory. {what_to_do}"
        )


def documents_by_separator(blocks: Iterable[str], separator: str, where: str = "a document") -> Iterator[str]:
    """Documents between occurrences of a literal separator, which belongs to none of them."""
    waiting = ""
    for block in blocks:
        *complete, waiting = (waiting + block).split(separator)
        for text in complete:
            yield text.strip("\n")
        require_short(len(waiting), where, "Check data.document_separator, or leave it out.")
    if waiting.strip():
        yield waiting.strip("\n")


def documents_by_heading(rows: Iterable[str], heading: str, where: str = "a document") -> Iterator[str]:
    """Rows joined into documents, a new one beginning at every row that matches the regular expression `heading`."""
    starts = re.compile(heading)
    current: list[str] = []
    length = 0
    for row in rows:
        if current and starts.match(row):
            yield "".join(current)
            current, length = [], 0
        current.append(row)
        length += len(row)
        require_short(length, where, "Check data.document_start, or leave it out.")
    if current:
        yield "".join(current)


COMPRESSED = (".gz", ".xz", ".zst", ".zip")
TEXT, ROWS, TABLES = (".txt", ".md", ".rst", ".raw", ".tokens"), (".jsonl", ".ndjson", ".json"), (".parquet", ".arrow")
SEPARATED = {".csv": ",", ".tsv": "\t"}
ALLOWED = (*TEXT, *ROWS, *SEPARATED, *TABLES)
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
    files = _find_files(path)
    for file in files:
        if file.resolve().parts[1:2] in (("proc",), ("sys",)):  # reading one may never end
            raise UserError(f"data.path={path}: {file} belongs to the system and holds no text; give another file.")
    return files


def _find_files(path: str) -> list[Path]:
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        files = [p for p in given.rglob("*") if p.is_file() and _shape(p)[0] in ALLOWED]
        if not files:
            raise UserError(
                f"data.path={path} is a folder without text files. Allowed: {' '.join(ALLOWED)}, each also with "
                f"{' '.join(COMPRESSED)}, and folders written by save_to_disk of Hugging Face datasets."
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


def fingerprint_of(path: Path) -> str:
    """Changes when the content of a file changes."""
    stat = path.stat()
    if stat.st_size <= _HASH_WHOLE:
        return file_sha256(path)
    with open(path, "rb") as file:
        head = file.read(_BLOCK)
        file.seek(-_BLOCK, io.SEEK_END)
        return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode() + head + file.read()).hexdigest()


@dataclass(frozen=True)
class FileUnit:
    """One file as a stream of document pieces; reading it twice gives the same pieces."""

    path: Path
    name: str
    split: str | None
    config: DataConfig

    def fingerprint(self) -> str:
        """Changes when the file's content changes."""
        return fingerprint_of(self.path)

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
        if kind not in TEXT and kind in ALLOWED:
            rows = (
                self._json_rows() if kind in ROWS
                else self._csv_rows(SEPARATED[kind]) if kind in SEPARATED
                else self._table_rows(kind)
            )  # fmt: skip
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

    def _csv_rows(self, separator: str) -> Iterator[str]:
        csv.field_size_limit(LARGEST_DOCUMENT)
        with self._text() as text:
            reader = csv.DictReader(text, delimiter=separator, strict=True)
            try:
                _need_column(self.path, self.config.column, list(reader.fieldnames or ()))
                for row in reader:
                    yield checked_text(row[self.config.column], f"{self.path} line {reader.line_num}", self.config)
            except csv.Error as error:
                raise UserError(f"{self.path} cannot be read after line {reader.line_num}: {error}.") from None

    def _table_rows(self, kind: str) -> Iterator[str]:
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


@dataclass(frozen=True)
class SavedUnit:
    """A dataset that Hugging Face datasets' `save_to_disk` wrote, or one split of a saved DatasetDict."""

    path: Path
    name: str
    split: str | None
    config: DataConfig

    def fingerprint(self) -> str:
        """Changes when the content of one of its files changes."""
        files = sorted(file for file in self.path.iterdir() if file.is_file())
        return hashlib.sha256(repr([(file.name, fingerprint_of(file)) for file in files]).encode()).hexdigest()

    def size_hint(self) -> int | None:
        """Bytes of its tables."""
        return sum(file.stat().st_size for file in self.path.glob("*.arrow"))

    def pieces(self) -> Iterator[Piece]:
        """Every document, in the dataset's order."""
        rows, heading = self._rows(), self.config.document_start
        for text in documents_by_heading(rows, heading, f"A document in {self.path}") if heading else rows:
            yield from pieces_of([text])

    def _rows(self) -> Iterator[str]:
        from datasets import load_from_disk

        column, number = self.config.column, 0
        try:
            dataset = load_from_disk(str(self.path))
            _need_column(self.path, column, dataset.column_names)
            for batch in dataset.select_columns([column]).with_format("arrow").iter(batch_size=256):
                values = batch.column(column)
                values.validate(full=True)  # wrong offsets would read other memory
                for value in values.to_pylist():
                    yield checked_text(value, f"{self.path} row {number}", self.config)
                    number += 1
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.path} is not a readable saved dataset: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from None


def saved_units(folder: Path, config: DataConfig) -> list[SavedUnit]:
    """The splits of a folder that `save_to_disk` wrote; none for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            parts = [folder / str(split) for split in splits]
            missing = [part.name for part in parts if part.parent != folder or not (part / "state.json").is_file()]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{folder}/dataset_dict.json cannot be read: {error}") from None
        if missing or not parts:
            raise UserError(f"{folder} is a saved DatasetDict without its split {', '.join(missing) or 'train'}")
        return [SavedUnit(part, part.name, split_of(part, folder), config) for part in parts]
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [SavedUnit(folder, folder.name, None, config)]
    return []


def file_units(path: str, config: DataConfig) -> list[FileUnit] | list[SavedUnit]:
    """The files of data.path as units of reading, each with the split its name speaks of; or a saved dataset."""
    root = Path(path).expanduser()
    if root.is_dir() and (saved := saved_units(root, config)):
        return saved
    root = root if root.is_dir() else Path(str(root).split("*")[0]).parent
    files = find_files(path)
    units = []
    for file in files:
        name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name
        name = os.fsencode(name).decode(errors="backslashreplace")  # a name need not be UTF-8
        units.append(FileUnit(file, name, split_of(file, root) if len(files) > 1 else None, config))
    return units


# What a batch of rows may need, should each of them be the longest value of its row group (dictionaries, prefixes).
_BATCH_BYTES = 1 << 30


def column_values(file: IO[bytes], kind: str, path: Path, column: str, require: Callable[[int], None]) -> Iterator[Any]:
    """The values of a column in order; `file` must be seekable, `require` refuses a size that is unpacked at once."""
    import pyarrow as pa

    read = _parquet if kind == ".parquet" else _arrow
    try:
        for batch in read(file, path, column, require):
            values = batch.column(column)
            values.validate(full=True)  # wrong offsets would read other memory
            flat = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
            # A dictionary or view may hold one long value a million times: made one at a time, where lists are faster.
            yield from values.to_pylist() if flat else (value.as_py() for value in values)
    except (pa.ArrowException, OSError, struct.error) as error:
        raise UserError(f"{path} is not a readable {kind} file: {str(error).splitlines()[0]}") from None


def _parquet(file: IO[bytes], path: Path, column: str, require: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        _need_column(path, column, table.schema_arrow.names)
        largest = 0
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            inside = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
            largest = max(largest, sum(chunk.total_uncompressed_size for chunk in inside))
        require(largest)
        rows = min(256, max(1, _BATCH_BYTES // max(largest, 1)))
        yield from table.iter_batches(columns=[column], batch_size=rows)


def _arrow(file: IO[bytes], path: Path, column: str, require: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow as pa

    # `datasets` writes the stream format, pyarrow's feather the file format: a name, the same stream, and a footer.
    named = file.read(6) == b"ARROW1"
    start = 8 if named else 0
    file.seek(start)
    for message in pa.ipc.MessageReader.open_stream(file):
        require(_unpacked_bytes(message))
    file.seek(0)
    expected = pa.ipc.open_file(file).num_record_batches if named else None
    file.seek(start)
    # The stream also of a file: its footer could name batches that were not looked at above.
    stream = pa.ipc.open_stream(file)
    _need_column(path, column, stream.schema.names)
    given = 0
    for batch in stream:
        given += 1
        yield batch
    if expected not in (None, given):
        raise UserError(f"{path} is damaged: it holds {given} batches of rows and its footer names {expected}.")


def _unpacked_bytes(message: Any) -> int:
    """What the compressed buffers of a message say they unpack to (arrow/format/Message.fbs); pyarrow does not tell."""
    head, body = memoryview(message.metadata), memoryview(message.body or b"")

    def number(kind: str, at: int) -> int:
        return struct.unpack_from(f"<{kind}", head, at)[0]

    def field(table: int, index: int) -> int | None:
        layout = table - number("i", table)
        offset = number("H", layout + 4 + 2 * index) if 4 + 2 * index < number("H", layout) else 0
        return table + offset if offset else None

    def follow(at: int | None) -> int:
        return 0 if at is None else at + number("I", at)

    root = number("I", 0)
    batch = follow(field(root, 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    elif message.type != "record batch":
        return 0
    if field(batch, 3) is None:  # not compressed
        return 0
    buffers, size = follow(field(batch, 2)), 0
    for index in range(number("I", buffers)):
        offset, length = struct.unpack_from("<qq", head, buffers + 4 + 16 * index)
        size += max(0, struct.unpack_from("<q", body, offset)[0]) if length else 0
    return size


def _need_column(path: Path, column: str, names: list[str]) -> None:
    if column not in names:
        raise UserError(f"{path} has no column {column!r} (it has: {', '.join(names)}); set data.column.")
