import csv
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from polarlm.data import LMDataModule, build_corpus
from polarlm.data.config import DataConfig
from polarlm.data.readers import file_units
from polarlm.errors import UserError

SAVED = ("train", "validation", "test")
DOCUMENTS = ["first – naïve\n", "", "second\x00with NUL", "third 北京\n\nparagraph"]


def two_frames(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (raw[:middle], raw[middle:]))


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": two_frames}


def read(path: str | Path, **options: object) -> list[str]:
    texts: list[str] = []
    for unit in file_units(str(path), DataConfig(**options)):  # type: ignore[arg-type]
        for piece in unit.pieces():
            texts.append(piece.text) if piece.first else texts.__setitem__(-1, texts[-1] + piece.text)
    return texts


def written(folder: Path, shape: str) -> bytes:
    table = pa.table({"text": DOCUMENTS, "id": list(range(4))})
    target = folder / "raw"
    if shape == "jsonl":
        return "".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(DOCUMENTS)).encode()
    if shape == "parquet":
        pq.write_table(table, target)
    else:
        writer = pa.ipc.new_stream if shape == "arrow" else pa.ipc.new_file
        with pa.OSFile(str(target), "wb") as sink, writer(sink, table.schema) as out:
            out.write_table(table)
    return target.read_bytes()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("shape", ["jsonl", "parquet", "arrow", "arrow file"])
def test_every_format_and_compression_gives_the_same_documents(tmp_path: Path, shape: str, packed: str) -> None:
    path = tmp_path / f"data.{shape.split()[0]}{packed}"
    path.write_bytes(PACK[packed](written(tmp_path, shape)))
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("tsv", "\t")])
def test_a_column_of_separated_values(tmp_path: Path, kind: str, separator: str, packed: str) -> None:
    texts = ["first – naïve, with a comma", 'a "quoted" word', "", "two\nlines", "NA", "42"]
    table = io.StringIO(newline="")
    csv.writer(table, delimiter=separator).writerows([["id", "text"], *enumerate(texts)])
    path = tmp_path / f"data.{kind}{packed}"
    path.write_bytes(PACK[packed](table.getvalue().encode()))
    assert read(path) == texts
    with pytest.raises(UserError, match=r"has no column 'body' \(it has: id, text\); set data.column"):
        read(path, column="body")


def test_a_broken_row_of_separated_values_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('text,id\n"fine",1\n"never closed,2\n')
    with pytest.raises(UserError, match=r"data.csv cannot be read after line 2: unexpected end"):
        read(tmp_path / "data.csv")


def test_a_saved_dataset_and_every_split_of_a_saved_dataset_dict(tmp_path: Path) -> None:
    made = {name: Dataset.from_dict({"text": [f"{name} {n}" for n in range(40)]}) for name in SAVED}
    made["train"].save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == [f"train {n}" for n in range(40)]
    DatasetDict(made).save_to_disk(tmp_path / "all")
    units = file_units(str(tmp_path / "all"), DataConfig())
    assert {unit.split: len(list(unit.pieces())) for unit in units} == {"train": 40, "val": 40, "test": 40}
    corpus = build_corpus({"path": str(tmp_path / "all")}, {"kind": "byte"}, tmp_path / "cache")
    assert [corpus.store(split).documents for split in ("train", "val", "test")] == [40, 40, 40]
    shuffled = made["train"].shuffle(seed=1).select(range(7))  # an order of its own, which saving keeps
    shuffled.save_to_disk(tmp_path / "shuffled")
    assert read(tmp_path / "shuffled") == shuffled[:]["text"]
    with pytest.raises(UserError, match=r"has no column 'body' \(it has: text\)"):
        read(tmp_path / "one", column="body")


def test_a_glob_of_parquet_shards_with_names_of_splits_trains(tmp_path: Path) -> None:
    for split, shards in (("train", 3), ("validation", 1)):
        for shard in range(shards):
            rows = [f"{split} shard {shard} row {row}, words enough for a window" for row in range(20)]
            pq.write_table(pa.table({"text": rows}), tmp_path / f"{split}-0000{shard}.parquet")
    corpus = build_corpus({"path": f"{tmp_path}/*.parquet"}, {"kind": "byte"}, tmp_path / "cache")
    assert [corpus.store(split).documents for split in corpus.splits] == [60, 20]
    module = LMDataModule(corpus, context=16, micro_batch=4, seed=1)
    assert next(iter(module.train_dataloader()))["tokens"].shape == (4, 16)


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    made = DatasetDict({name: Dataset.from_dict({"text": ["a", "b"]}) for name in SAVED})
    made.save_to_disk(tmp_path / "all")
    (tmp_path / "all" / "train" / "data-00000-of-00001.arrow").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"all/train is not a readable saved dataset"):
        read(tmp_path / "all")
    (tmp_path / "all" / "test" / "state.json").unlink()
    with pytest.raises(UserError, match=r"saved DatasetDict without its split test"):
        read(tmp_path / "all")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["../elsewhere"]}')
    with pytest.raises(UserError, match=r"saved DatasetDict without its split elsewhere"):
        read(tmp_path / "all")


@pytest.mark.parametrize("packed", [*PACK, ".zip"])
def test_text_files_are_one_document_each(tmp_path: Path, packed: str) -> None:
    text = "a line\n\x00 and NUL ü\n"
    path = tmp_path / f"book.txt{packed}"
    if packed == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("book.txt", text)
    else:
        path.write_bytes(PACK[packed](text.encode()))
    assert read(path) == [text]


def test_folder_and_glob_are_read_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.md", "picture.png"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/c.md"]
    assert read(f"{tmp_path}/**/*.md") == ["sub/c.md"]


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read(path) == ["one\ntwo\n"]
    assert read(path, newlines="keep") == ["one\r\ntwo\r\n"]


def test_own_splits_are_found_in_names(tmp_path: Path) -> None:
    for name in ("wiki.train.txt", "wiki.valid.txt", "test/part.txt", "retrained.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    splits = {unit.name: unit.split for unit in file_units(str(tmp_path), DataConfig())}
    assert splits == {
        "retrained.txt": None,
        "test/part.txt": "test",
        "wiki.train.txt": "train",
        "wiki.valid.txt": "val",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9 au lait", r"latin.txt is not UTF-8: byte 0xe9.*data.errors=replace"),
        ("wide.txt", "hi".encode("utf-16"), "UTF-16"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("array.jsonl", b'[{"text": \n', "not one big array"),
        ("other.jsonl", b'{"body": "a"}\n', r"no key 'text' \(it has: body\); set data.column"),
        ("number.jsonl", b'{"text": 3}\n', "holds int, not text"),
        ("half.jsonl", b'{"text": "\\ud800"}\n', "not valid Unicode"),
        ("broken.parquet", b"PAR1 nothing", "not a readable .parquet"),
        ("cut.txt.gz", gzip.compress(b"x" * 10000, mtime=0)[:30], "is the file complete"),
    ],
)
def test_unreadable_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_invalid_bytes_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert read(tmp_path / "latin.txt", errors="replace") == ["caf�"]


def test_missing_paths_and_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*does not exist.*data=pydocs"):
        read(tmp_path / "none.txt")
    with pytest.raises(UserError, match="folder without text files"):
        read(tmp_path)
