"""Settings, files and tokenizers from a stranger: one sentence, nothing harmed."""

import io
import json
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlm.data import Corpus, build_corpus, load_tokenizer
from polarlm.data.config import read_data_config
from polarlm.data.tokenizer import SubwordTokenizer
from tests.data.refusals import refused

Build = Callable[..., Corpus]
BYTE = {"kind": "byte"}


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc/x", "..", ".", "", ".hidden", "a\\b", "a\nb", "x" * 101, "\x1b[2J"]
)
def test_a_name_cannot_lead_out_of_the_cache(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    before = sorted(tmp_path.rglob("*"))
    data = {"name": name, "path": str(tmp_path / "text.txt")}
    message = refused(lambda: build_corpus(data, BYTE, tmp_path / "inner" / "cache"), "data.name=", "plain name")
    assert "\x1b" not in message and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "FILE:///etc/passwd", "ftp://host/x", "/etc/passwd", "data:,x", ""]
)
def test_only_the_web_is_downloaded_from(tmp_path: Path, url: str) -> None:
    refused(lambda: build_corpus({"name": "x", "url": url}, BYTE, tmp_path / "cache"), "data.url=", "https://")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"eval_tokens": -1}, "data.eval_tokens=-1 must be a whole number ≥ 2"),
        ({"eval_tokens": 1.5}, "data.eval_tokens=1.5 must be a whole number"),
        ({"max_bytes": 0}, "data.max_bytes=0 must be a whole number ≥ 1"),
        ({"max_bytes": "all"}, "data.max_bytes='all'"),
        ({"mask_documents": "maybe"}, "data.mask_documents='maybe' must be true or false"),
        ({"append_eos": 1}, "data.append_eos=1 must be true or false"),
        ({"workers": 0}, "data.workers=0"),
        ({"workers": 10**9}, "data.workers=1000000000"),
        ({"stream_head_bytes": -5}, "data.stream_head_bytes=-5"),
        ({"split": {"val": -0.1}}, "data.split.val=-0.1"),
        ({"split": {"val": float("nan")}}, "data.split.val=nan"),
        ({"split": {"val": 0.6, "test": 0.4}}, "leave nothing to train on"),
        ({"split": "hash"}, "data.split='hash' must be a group of settings"),
        ({"errors": "surrogateescape"}, "data.errors='surrogateescape' is not allowed"),
        ({"document_start": "("}, "data.document_start='(' is not a regular expression"),
        ({"document_separator": ""}, "data.document_separator is empty"),
        ({"weights": {"a": -1}}, "data.weights.a=-1 must be a number > 0"),
        ({"hub": {"fetch": "steal"}}, "data.hub.fetch='steal' is not allowed"),
        ({"note": "x"}, "data.note is not an option"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_read(given: dict[str, Any], part: str) -> None:
    assert refused(lambda: read_data_config(given), part).startswith("data.")


# --- files ------------------------------------------------------------------------------------------------------------


def _zip(*members: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for member in members:
            archive.writestr(member, "text " * 100)
    return packed.getvalue()


_GZIP = bytes.fromhex("1f8b0800000000000003")
HOSTILE_FILES = {
    "cut.txt.gz": _GZIP + b"\x4b",
    "not.txt.gz": b"plain text",
    "broken-inside.txt.gz": _GZIP + b"\xff" * 40,
    "not.txt.xz": b"plain text",
    "cut.txt.xz": bytes.fromhex("fd377a585a000004e6d6b446"),
    "not.txt.zst": b"plain text",
    "cut.txt.zst": bytes.fromhex("28b52ffd0458"),
    "not.txt.zip": b"plain text",
    "two.txt.zip": _zip("a.txt", "b.txt"),
    "none.txt.zip": _zip(),
    "cut.txt.zip": _zip("a.txt")[:60],
    "latin.txt": b"caf\xe9 " * 50,
    "utf16.txt": "text".encode("utf-16") * 50,
    "deep.jsonl": b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "digits.jsonl": b'{"text": ' + b"9" * 10_000 + b"}",
    "array.jsonl": b'[{"text": "a"}]',
    "half.jsonl": b'{"text": "a',
    "number.jsonl": b'{"text": 3}',
    "surrogate.jsonl": b'{"text": "\\ud800"}',
    "nul.jsonl": b"\x00\x00\x00",
    "not.parquet": b"PAR1 but nothing else PAR1",
    "empty.parquet": b"",
    "footer.parquet": b"PAR1" + b"\xff" * 64 + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
    "not.arrow": b"ARROW1\0\0 but nothing else",
    "stream.arrow": b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    "packed.parquet.gz": b"plain text",
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_a_file_that_is_not_what_its_name_says_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "given" / name
    path.parent.mkdir()
    path.write_bytes(HOSTILE_FILES[name])
    refused(lambda: build_corpus({"path": str(path)}, BYTE, tmp_path / "cache"), name)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes and devices in the file system")
def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    refused(lambda: build_corpus({"path": str(tmp_path / "pipe.txt")}, BYTE, tmp_path / "cache"), "pipe.txt")
    refused(lambda: build_corpus({"path": "/dev/zero"}, BYTE, tmp_path / "cache"), "/dev/zero")
    assert not list((tmp_path / "cache").rglob("*.bin"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_file_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    for name in (b"a\xff.txt", b"b\x1b[2J.txt"):
        with open(os.path.join(os.fsencode(folder), name), "w") as file:
            file.write("some text " * 50)
    corpus = build_corpus({"path": str(folder)}, BYTE, tmp_path / "cache")
    assert corpus.manifest["units"][0] == "a\\xff.txt" and corpus.store("train").bytes > 500


# --- tokenizers -------------------------------------------------------------------------------------------------------


def _tokenizer_json(vocabulary: dict[str, int]) -> str:
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (_tokenizer_json({"[UNK]": 0, "cat": 2_000_000_000}), "ids up to 2,000,000,000"),
        (_tokenizer_json({"[UNK]": 0, "cat": -1}), "not a readable tokenizer.json"),
        (_tokenizer_json({}), "no tokens"),
        ("[" * 200_000, "not a readable tokenizer.json"),
        ("null", "not a readable tokenizer.json"),
        ('{"model": 3}', "not a readable tokenizer.json"),
        ("\x00", "not a readable tokenizer.json"),
    ],
    ids=["huge id", "negative id", "empty", "deep", "null", "no model", "nul"],
)
def test_a_hostile_tokenizer_is_refused_before_memory_is_asked_for(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    tracemalloc.start()
    refused(lambda: SubwordTokenizer.from_file(tmp_path), "tokenizer.json", part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # a table of two billion entries would be a thousand times that


@pytest.mark.parametrize(
    "saved",
    ["", "[", "3", "{}", '{"kind": "os.system"}', '{"kind": "char"}', '{"kind": "char", "alphabet": ["a"]}',
     '{"kind": "char", "alphabet": "ba"}', '{"kind": "char", "alphabet": ""}', '{"kind": "word", "words": ["a"]}',
     '{"kind": "word", "words": 3}', '{"kind": "bpe"}', '{"kind": ["bpe"]}'],
)  # fmt: skip
def test_a_damaged_saved_tokenizer_is_one_sentence(tmp_path: Path, saved: str) -> None:
    (tmp_path / "polarlm_tokenizer.json").write_text(saved)
    message = refused(lambda: load_tokenizer(tmp_path))
    assert str(tmp_path) in message


def test_an_endless_regular_expression_is_given_up_in_one_sentence() -> None:
    endless = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    given = {"version": "1.0", "added_tokens": [], "normalizer": endless, "model": model}
    tokenizer = SubwordTokenizer(json.dumps(given))
    for encode in (tokenizer.encode_array, lambda text: tokenizer.encode_batch([text])):
        assert "another tokenizer" in refused(lambda encode=encode: encode("a" * 60 + "!"), "can't encode the text")
