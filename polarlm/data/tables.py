"""A column of text out of tables: .parquet and .arrow files, what `save_to_disk` wrote, datasets of the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from polarlm.data.atomic import allowed_bytes, allowed_in_memory, require_allowed
from polarlm.data.config import DataConfig
from polarlm.data.readers import TOO_FAR, Piece, Unit, checked_text, fingerprint_of, need_column, row_pieces, split_of
from polarlm.errors import UserError

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
