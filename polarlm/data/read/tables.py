"""One column of a .parquet or .arrow file, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from polarlm.errors import UserError


def column_values(file: IO[bytes], kind: str, path: Path, column: str) -> Iterator[Any]:
    """The values of a column in order; `file` must be seekable."""
    import pyarrow as pa

    try:
        for batch in _parquet(file, path, column) if kind == ".parquet" else _arrow(file, path, column):
            yield from batch.column(column).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable {kind} file: {str(error).splitlines()[0]}") from None


def _parquet(file: IO[bytes], path: Path, column: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        _need_column(path, column, table.schema_arrow.names)
        yield from table.iter_batches(columns=[column], batch_size=256)


def _arrow(file: IO[bytes], path: Path, column: str) -> Iterator[Any]:
    import pyarrow as pa

    # `datasets` writes the stream format, pyarrow's feather the file format (which begins with its name).
    named = file.read(6) == b"ARROW1"
    file.seek(0)
    if not named:
        stream = pa.ipc.open_stream(file)
        _need_column(path, column, stream.schema.names)
        yield from stream
        return
    reader = pa.ipc.open_file(file)
    _need_column(path, column, reader.schema.names)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _need_column(path: Path, column: str, names: list[str]) -> None:
    if column not in names:
        raise UserError(f"{path} has no column {column!r} (it has: {', '.join(names)}); set data.column.")
