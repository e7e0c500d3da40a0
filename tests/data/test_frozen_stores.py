"""The bytes of a token store, and the name it lies under in the cache, do not depend on which reader read the text."""

import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from polarlm.data import build_corpus
from tests.data.conftest import made_up_documents

# Line ends of every system, blank lines, a lone CR, NUL, separators that only some readers take for a line end, no
# line end at the end.
LINES = (
    "\ufeffone\r\n\r\n\r\ntwo \x0b\x0c\x1c\x85\u2028 three\rfour\n\n"
    " \x00\tfive, na\u00efve \u5317\u4eac \U0001f600\n\n\n\nlast"
)
BOOK = LINES + "".join(f"\n\n = Chapter {n} = \n\n{text}" for n, text in enumerate(made_up_documents(60))) + "\r\nend"
ROWS = [*made_up_documents(60), "", LINES[1:], "2024-05-01", "2024-05-01T12:00:00", "12", "null", " ", "\r\n"]

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda raw: gzip.compress(raw, mtime=0),
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write_text(folder: Path, packed: str) -> None:
    (folder / f"book.txt{packed}").write_bytes(PACK[packed](BOOK.encode()))


def write_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "book.txt.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("book.txt"), BOOK.encode())


def write_jsonl(folder: Path, packed: str) -> None:
    raw = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(ROWS)).encode()
    (folder / f"rows.jsonl{packed}").write_bytes(PACK[packed](raw))


def write_table(folder: Path, kind: str) -> None:
    table = pa.table({"text": ROWS, "id": list(range(len(ROWS)))})
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=16)
        return
    writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, writer(sink, table.schema) as out:
        out.write_table(table, max_chunksize=16)


def write_splits(folder: Path) -> None:
    for split, texts in (("train", ROWS[:40]), ("valid", ROWS[40:50]), ("test", ROWS[50:60])):
        (folder / f"{split}.txt").write_text("\n\n".join(texts))


BYTE: dict[str, Any] = {"kind": "byte"}
CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any], dict[str, Any]]] = {
    **{f"text{packed}": (lambda f, p=packed: write_text(f, p), {}, BYTE) for packed in PACK},
    "text.zip": (write_zip, {}, BYTE),
    "text kept": (lambda f: write_text(f, ""), {"newlines": "keep"}, BYTE),
    "text bpe": (lambda f: write_text(f, ""), {}, {"kind": "bpe", "vocab_size": 300}),
    "text chapters": (lambda f: write_text(f, ""), {"document_start": r"^ = .* = \n?$"}, BYTE),
    "text separated": (lambda f: write_text(f, ""), {"document_separator": " = Chapter"}, BYTE),
    "text cut": (lambda f: write_text(f, ".gz"), {"max_bytes": 2000}, BYTE),
    "own splits": (write_splits, {}, BYTE),
    **{f"jsonl{packed}": (lambda f, p=packed: write_jsonl(f, p), {}, BYTE) for packed in PACK},
    "jsonl kept": (lambda f: write_jsonl(f, ""), {"newlines": "keep"}, BYTE),
    "jsonl words": (lambda f: write_jsonl(f, ""), {}, {"kind": "word"}),
    **{kind: (lambda f, k=kind: write_table(f, k), {}, BYTE) for kind in ("parquet", "stream", "file")},
    "parquet kept": (lambda f: write_table(f, "parquet"), {"newlines": "keep"}, BYTE),
}  # fmt: skip
# (tokens and tokenizer, name in the cache; None where a library decides the bytes of the file).
FROZEN: dict[str, tuple[str, str | None]] = {
    "text": ("20c23aea21ce4b8d", "text-byte-073afedd1d3a"),
    "text.gz": ("20c23aea21ce4b8d", None),
    "text.xz": ("20c23aea21ce4b8d", None),
    "text.zst": ("20c23aea21ce4b8d", None),
    "text.zip": ("20c23aea21ce4b8d", "text-byte-cda9ac2dd44d"),
    "text kept": ("9510bcf0db276842", "text-byte-99ef0fcf6923"),
    "text bpe": ("f1ec93a700f22a0d", "text-bpe-7766a425ae68"),
    "text chapters": ("04ef82df540d08bf", "text-byte-1a57214e74cf"),
    "text separated": ("ea4598d7e012b891", "text-byte-038677299e35"),
    "text cut": ("bf536c3f3d8bcc0a", None),
    "own splits": ("c143b1ce13eef681", "text-byte-c2e25307d756"),
    "jsonl": ("02f039eb211e08c1", "text-byte-e775be165cbd"),
    "jsonl.gz": ("02f039eb211e08c1", None),
    "jsonl.xz": ("02f039eb211e08c1", None),
    "jsonl.zst": ("02f039eb211e08c1", None),
    "jsonl kept": ("26eda32a30c640b4", "text-byte-490ca347f927"),
    "jsonl words": ("9070a831ba11868d", "text-word-0a83e7a4f16f"),
    "parquet": ("02f039eb211e08c1", None),
    "stream": ("02f039eb211e08c1", None),
    "file": ("02f039eb211e08c1", None),
    "parquet kept": ("26eda32a30c640b4", None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_text_is_stored_as_the_same_bytes_under_the_same_name(tmp_path: Path, case: str) -> None:
    write, options, tokenizer = CASES[case]
    (tmp_path / "given").mkdir()
    write(tmp_path / "given")
    corpus = build_corpus({"path": str(tmp_path / "given"), **options}, tokenizer, tmp_path / "cache")
    content, name = FROZEN[case]
    assert corpus.content[:16] == content
    assert name is None or corpus.folder.name == name
