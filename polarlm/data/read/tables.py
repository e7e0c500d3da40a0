"""One column of a .parquet or .arrow file, batch by batch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from polarlm.errors import UserError

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
