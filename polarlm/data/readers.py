"""Files of text as documents: text, .jsonl, .csv and tables, packed or not, each a stream of bounded pieces."""

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
from functools import partial
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


@dataclass(frozen=True)
class Unit:
    """A file, or a split of a dataset or of a task: `pieces` reads its text from the beginning, again and again."""

    name: str
    split: str | None
    pieces: Callable[[], Iterator[Piece]]
    size: int | None = None  # bytes of text, as far as anybody knows before it is read
    fingerprint: Callable[[], str] = str  # of files: changes when their content changes


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


def row_pieces(rows: Iterable[str], config: DataConfig, where: str) -> Iterator[Piece]:
    """The pieces of documents that are rows of a file or dataset, or begin at rows that match data.document_start."""
    heading = config.document_start
    for text in documents_by_heading(rows, heading, where) if heading else rows:
        yield from pieces_of([text])


COMPRESSED = (".gz", ".xz", ".zst", ".zip")
TEXT, ROWS, TABLES = (".txt", ".md", ".rst", ".raw", ".tokens"), (".jsonl", ".ndjson", ".json"), (".parquet", ".arrow")
SEPARATED = {".csv": ",", ".tsv": "\t"}
ALLOWED = (*TEXT, *ROWS, *SEPARATED, *TABLES)
_SPLIT_NAMES = {"train": "train|training", "val": "valid|validation|val|dev", "test": "test"}
_BLOCK = 1 << 20
# Up to here a file is identified by its content, above by size, time and both ends: hashing 100 GB takes minutes.
_HASH_WHOLE = 64 << 20
TOO_FAR = (
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
    given = Path(os.path.expanduser(path))
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


# Bytes of text per byte of a file, as its format usually has it: for the time that is left.
_EXPANDS = {"": 1.0, ".gz": 2.8, ".xz": 3.5, ".zst": 3.2, ".zip": 2.8, ".parquet": 2.0}


class FileReader:
    """One file as a stream of document pieces; reading it twice gives the same pieces."""

    def __init__(self, path: Path, config: DataConfig):
        self.path, self.config = path, config
        self.kind, self.packed = _shape(path)

    def size(self) -> int:
        """Bytes of text in the file, as far as its size and format tell."""
        return int(self.path.stat().st_size * _EXPANDS[self.packed] * _EXPANDS.get(self.kind, 1.0))

    def pieces(self) -> Iterator[Piece]:
        """Every document of the file, in order, as bounded pieces."""
        separator, where = self.config.document_separator, f"A document in {self.path}"
        if self.kind in ROWS:
            yield from row_pieces(self._json_rows(), self.config, where)
        elif self.kind in SEPARATED:
            yield from row_pieces(self._csv_rows(SEPARATED[self.kind]), self.config, where)
        elif self.kind in TABLES:
            yield from row_pieces(self._table_rows(), self.config, where)
        elif separator:
            for text in documents_by_separator(self._blocks(), separator, where):
                yield from pieces_of([text])
        elif self.config.document_start:
            yield from row_pieces(self._lines(), self.config, where)
        else:
            yield from pieces_of(self._blocks())

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with contextlib.ExitStack() as stack:
                file = self._unpacked(stack)
                if self.packed:
                    file = io.BufferedReader(Expanded(file, self.path, self._allowed(), TOO_FAR), _BLOCK)
                yield file
        except (UserError, UnicodeDecodeError):
            raise
        except _unreadable() as error:
            raise UserError(f"{self.path} cannot be read to its end ({error}); is the file complete?") from None

    def _allowed(self) -> int:
        return allowed_bytes(self.path, self.config.max_bytes)

    def _unpacked(self, stack: contextlib.ExitStack) -> IO[bytes]:
        file: Any
        if self.packed == ".gz":
            import gzip

            file = gzip.open(self.path, "rb")  # noqa: SIM115  (the stack closes it)
        elif self.packed == ".xz":
            import lzma

            file = lzma.open(self.path, "rb")  # noqa: SIM115
        elif self.packed == ".zst":
            import zstandard

            raw = stack.enter_context(open(self.path, "rb"))  # noqa: SIM115
            file = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
        elif self.packed == ".zip":
            import zipfile

            archive = stack.enter_context(zipfile.ZipFile(self.path))
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) != 1:
                raise UserError(f"{self.path} holds {len(members)} files; unpack it and give the folder as data.path.")
            require_allowed(self.path, members[0].file_size, self._allowed(), TOO_FAR)
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
                need_column(str(self.path), self.config.column, list(reader.fieldnames or ()))
                for row in reader:
                    yield checked_text(row[self.config.column], f"{self.path} line {reader.line_num}", self.config)
            except csv.Error as error:
                raise UserError(f"{self.path} cannot be read after line {reader.line_num}: {error}.") from None

    def _table_rows(self) -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._open())
            if self.packed:
                # Tables are read by jumping about: a compressed one is unpacked to a temporary file first.
                spool = stack.enter_context(tempfile.TemporaryFile())
                with explained(Path(tempfile.gettempdir()) / self.path.name):
                    shutil.copyfileobj(file, spool, _BLOCK)
                spool.seek(0)
                file = spool
            yield from table_texts(file, self.kind, self.path, self.config)


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


def need_column(where: str, column: str, names: list[str]) -> None:
    """Refuse rows that have no such column."""
    if column not in names:
        raise UserError(f"{where} has no column {column!r} (it has: {', '.join(names)}); set data.column.")


def file_units(path: str, config: DataConfig) -> list[Unit]:
    """The files of data.path as units of reading, each with the split its name speaks of; or a saved dataset."""
    root = Path(os.path.expanduser(path))
    saved = [{"dataset_dict.json"}, {"state.json", "dataset_info.json"}]
    if any(all((root / name).is_file() for name in names) for names in saved):
        return saved_units(root, config)
    root = root if root.is_dir() else Path(str(root).split("*")[0]).parent
    files = find_files(path)
    units = []
    for file in files:
        name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name
        name = os.fsencode(name).decode(errors="backslashreplace")  # a name need not be UTF-8
        split, reader = split_of(file, root) if len(files) > 1 else None, FileReader(file, config)
        units.append(Unit(name, split, reader.pieces, reader.size(), functools.partial(fingerprint_of, file)))
    return units


# -- tables: .parquet and .arrow files, what `save_to_disk` wrote, datasets of the hub ---------------------------------


# What a batch of rows may need, should each of them be the longest value of its row group (dictionaries, prefixes).
_BATCH_BYTES = 1 << 30
_ROWS = 256  # of a batch


def column_texts(batches: Iterable[Any], where: str, config: DataConfig) -> Iterator[str]:
    """The texts of data.column, batch after batch of Arrow's."""
    import pyarrow as pa

    number = 0
    for batch in batches:
        values = batch.column(config.column)
        values.validate(full=True)  # wrong offsets would read other memory
        flat = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        # A dictionary or view may hold one long value a million times: made one at a time, where lists are faster.
        for value in values.to_pylist() if flat else (value.as_py() for value in values):
            yield checked_text(value, f"{where} row {number}", config)
            number += 1


@contextlib.contextmanager
def readable(where: str, what: str) -> Iterator[None]:
    """Turn what pyarrow, datasets and the hub's client raise (dozens of kinds) into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines() or ["no reason given"]
        raise UserError(f"{where} is not a readable {what}: {type(error).__name__}: {words[0][:300]}") from error


# --- datasets ---------------------------------------------------------------------------------------------------------


def dataset_pieces(open_dataset: Callable[[], Any], where: str, what: str, config: DataConfig) -> Iterator[Piece]:
    """Every document of a dataset of Hugging Face datasets, whole or streamed, in its order."""

    def texts() -> Iterator[str]:
        with readable(where, what):
            dataset = open_dataset()
            if dataset.column_names is not None:  # of a stream nobody may know them
                need_column(where, config.column, dataset.column_names)
            batches = dataset.select_columns([config.column]).with_format("arrow").iter(batch_size=_ROWS)
            yield from column_texts(batches, where, config)

    yield from row_pieces(texts(), config, f"A document in {where}")


def saved_units(folder: Path, config: DataConfig) -> list[Unit]:
    """What `save_to_disk` wrote into a folder: a dataset, or every split of a DatasetDict."""
    listed = folder / "dataset_dict.json"
    if not listed.is_file():
        return [_saved_unit(folder, None, config)]
    try:
        parts = [folder / str(split) for split in json.loads(listed.read_text(encoding="utf-8"))["splits"]]
        missing = [part.name for part in parts if part.parent != folder or not (part / "state.json").is_file()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{listed} cannot be read: {error}") from None
    if missing or not parts:
        raise UserError(f"{folder} is a saved DatasetDict without its split {', '.join(missing) or 'train'}")
    return [_saved_unit(part, split_of(part, folder), config) for part in parts]


def _saved_unit(folder: Path, split: str | None, config: DataConfig) -> Unit:
    def opened() -> Any:
        from datasets import load_from_disk

        return load_from_disk(str(folder))

    def fingerprint() -> str:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        return hashlib.sha256(repr([(file.name, fingerprint_of(file)) for file in files]).encode()).hexdigest()

    size = sum(file.stat().st_size for file in folder.glob("*.arrow"))
    pieces = partial(dataset_pieces, opened, str(folder), "saved dataset", config)
    return Unit(folder.name, split, pieces, size, fingerprint)


# --- files ------------------------------------------------------------------------------------------------------------


def table_texts(file: IO[bytes], kind: str, path: Path, config: DataConfig) -> Iterator[str]:
    """The texts of an opened .parquet or .arrow file (seekable); refuses one that would unpack too far."""
    # A batch of a .arrow file is unpacked at once, a row group of a .parquet file page by page.
    read, limit = (_arrow, allowed_in_memory) if kind == ".arrow" else (_parquet, allowed_bytes)
    refuse = partial(require_allowed, path, what_to_do=TOO_FAR)
    allowed, size = allowed_bytes(path, config.max_bytes), 0
    with readable(str(path), f"{kind} file"):
        batches = read(file, path, config.column, partial(refuse, allowed=limit(path, config.max_bytes)))
        for text in column_texts(batches, str(path), config):
            size += len(text)
            refuse(size, allowed=allowed)
            yield text


def _parquet(file: IO[bytes], path: Path, column: str, require: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        need_column(str(path), column, table.schema_arrow.names)
        largest = 0
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            inside = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
            largest = max(largest, sum(chunk.total_uncompressed_size for chunk in inside))
        require(largest)
        rows = min(_ROWS, max(1, _BATCH_BYTES // max(largest, 1)))
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
    need_column(str(path), column, stream.schema.names)
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
