"""Compressed files from a stranger that expand without end: refused before memory or disk is full."""

import errno
import gzip
import io
import json
import lzma
import struct
import tempfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from polarlm.data import atomic, build_corpus, readers
from tests.data.refusals import refused

BYTE = {"kind": "byte"}
MEGABYTE = 1 << 20
SENTENCE = "The same sentence stands here again and again. "
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


def _zip_bomb(gigabytes: int) -> bytes:
    """A zip file of zeros (without a checksum): one deflated block of 16 MB, repeated without being deflated again."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(16 * MEGABYTE)) + deflate.flush(zlib.Z_FULL_FLUSH)
    content, size = block * (64 * gigabytes) + deflate.flush(), gigabytes << 30
    name = b"text.parquet"
    common = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 0, len(content), size, len(name), 0)
    local = b"PK\3\4" + common + name
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHLL", 0, 0, 0, 0, 0) + name
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(central), len(local) + len(content), 0)
    return local + content + central + end


def _arrow_bomb() -> bytes:
    """One batch of 96 columns, each of 16 MB in a few hundred bytes; pyarrow unpacks all of them to read one."""
    column = pa.array([" " * 16 * MEGABYTE])
    table = pa.table({"text" if n == 0 else f"column{n}": column for n in range(96)})
    packed = io.BytesIO()
    with pa.ipc.new_file(packed, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return packed.getvalue()


def arrow_peak() -> int:
    """The most that pyarrow ever held, in bytes."""
    return pa.default_memory_pool().max_memory() or 0


@pytest.mark.parametrize(("name", "made"), [("a.parquet.zip", lambda: _zip_bomb(3)), ("a.arrow", _arrow_bomb)])
def test_a_small_file_that_says_it_holds_gigabytes_is_refused_at_once(
    tmp_path: Path, name: str, made: Callable[[], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(made())
    before = arrow_peak()
    message = refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), name, "data.max_bytes")
    assert "GB; allowed are 1.1 GB" in message and path.stat().st_size < 4 * MEGABYTE
    assert arrow_peak() <= before + MEGABYTE


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "ALWAYS_ALLOWED", 4 * MEGABYTE)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "arrow"])
def test_what_says_nothing_of_its_size_is_refused_when_it_has_grown_too_far(
    tmp_path: Path, kind: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path = tmp_path / f"bomb.{kind}.{packing}"
    path.write_bytes(PACK[packing](b" " * 4 * MEGABYTE) * 16)  # all of these formats may be written one after another
    tracemalloc.start()
    try:
        refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), path.name, "expands", "data.path")
        assert tracemalloc.get_traced_memory()[1] < 32 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "cache").rglob("*.bin"))


def test_a_disk_too_small_for_a_packed_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("polarlm.data.readers.shutil.copyfileobj", full)
    path = tmp_path / "table.parquet.gz"
    path.write_bytes(gzip.compress(b"any"))
    refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), path.name, "disk is full", "are free")
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.usefixtures("small_limit")
def test_a_table_of_one_long_value_again_and_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_BATCH_BYTES", 8 * MEGABYTE)
    path = tmp_path / "repeated.parquet"
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array([" " * MEGABYTE]))
    pq.write_table(pa.table({"text": values}), path, dictionary_pagesize_limit=2 * MEGABYTE, store_schema=False)
    before = arrow_peak()
    refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), path.name, "expands", "data.max_bytes")
    assert path.stat().st_size < MEGABYTE and arrow_peak() < before + 64 * MEGABYTE


@pytest.mark.usefixtures("small_limit")
def test_a_row_group_that_says_it_is_too_large_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"text": [" " * 32 * MEGABYTE]}), path, compression="zstd", use_dictionary=False)
    before = arrow_peak()
    refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), path.name, "33.6 MB", "data.max_bytes")
    assert arrow_peak() <= before + MEGABYTE


@pytest.mark.parametrize("packing", [*PACK, "zip"])
def test_text_that_compresses_a_thousand_times_is_read(tmp_path: Path, packing: str) -> None:
    text = (SENTENCE * 100_000).encode()
    path = tmp_path / f"text.txt.{packing}"
    if packing == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
            archive.writestr("text.txt", text)
    else:
        path.write_bytes(PACK[packing](text))
    assert len(text) > atomic.LARGEST_RATIO * path.stat().st_size
    corpus = build_corpus({"path": str(path)}, BYTE, tmp_path / "cache")
    assert sum(corpus.store(split).bytes for split in corpus.splits) == len(text)


@pytest.mark.usefixtures("small_limit")
def test_a_size_that_the_user_names_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    row = json.dumps({"text": SENTENCE * 1000}) + "\n"
    path.write_bytes(gzip.compress(row.encode() * 120))
    refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), "text.jsonl.gz", "data.max_bytes")
    data = {"path": str(path), "max_bytes": 8 * MEGABYTE, "split": {"rule": "position"}}
    corpus = build_corpus(data, BYTE, tmp_path / "cache")
    assert sum(corpus.store(split).bytes for split in corpus.splits) == 120 * 1000 * len(SENTENCE)


@pytest.mark.parametrize(
    ("name", "settings", "part"),
    [
        ("long.jsonl", {}, "line 1 has"),
        ("long.txt", {"document_separator": "<end>"}, "Check data.document_separator"),
        ("long.txt", {"document_start": "^= "}, "Check data.document_start"),
    ],
)
def test_a_document_that_does_not_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, str], part: str
) -> None:
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 2 * MEGABYTE)
    path = tmp_path / name
    path.write_text((SENTENCE + ("\n" if "document_start" in settings else "")) * 100_000)
    data = {"path": str(path), **settings}
    refused(lambda: build_corpus(data, BYTE, tmp_path / "cache"), name, part, "held in memory")
    assert not list((tmp_path / "cache").rglob("*.bin"))
