"""Full and read-only disks, damaged caches, broken downloads: one sentence, nothing half done is kept."""

import errno
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.data import atomic as atomic_module
from polarlm.data.atomic import write_beside, write_sorted_json
from polarlm.data.order import PackedSequences
from tests.data.conftest import made_up_documents
from tests.data.refusals import FullDisk, refused

Build = Callable[..., Corpus]
BYTE = {"kind": "byte"}

# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in the file system")
def test_a_pipe_a_device_and_a_folder_are_not_replaced(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    for target in (pipe, folder, tmp_path / "link"):
        refused(lambda target=target: write_beside(target, b"x"), str(target), "not a file")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_names_the_file_and_what_is_needed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "summary.json"
    write_sorted_json(target, {"old": True})
    with monkeypatch.context() as patch:
        FullDisk(patch, 0)
        refused(lambda: write_beside(target, b"x" * 5_000_000), "disk is full", "summary.json", "5.0 MB are needed")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(target.read_text()) == {"old": True}


@pytest.mark.parametrize("after", [0, 1, 4, 9, 14, 25])
def test_preparing_on_a_full_disk_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in made_up_documents(200)))
    data = {"path": str(texts), "split": {"rule": "hash", "val": 0.1}}

    def build(cache: Path) -> Corpus:
        return build_corpus(data, {"kind": "bpe", "vocab_size": 300}, cache, section_bytes=10_000)

    with monkeypatch.context() as patch:
        disk = FullDisk(patch, after)
        message = refused(lambda: build(tmp_path / "cache"), "disk is full", str(tmp_path / "cache"), "are free")
        assert disk.refused
    assert after < 12 or "are needed" in message  # from the second section on it knows how much
    assert not [path for path in (tmp_path / "cache").rglob("*") if ".tmp" in path.name]
    whole, continued = build(tmp_path / "undisturbed"), build(tmp_path / "cache")
    assert continued.manifest == whole.manifest and continued.content == whole.content


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_prepared_cache_that_cannot_be_written_is_usable(
    documents: list[str], corpus_of: Build, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("polarlm.data.corpus._ALWAYS_VERIFY", 0)  # also what large stores would note down
    prepared = corpus_of(documents)
    (prepared.folder / "verified.json").unlink(missing_ok=True)
    before = {path: path.stat().st_mtime_ns for path in prepared.folder.parent.rglob("*")}
    _forbid_writing(monkeypatch, prepared.folder.parent, code)
    corpus = corpus_of(documents)
    assert corpus.content == prepared.content
    for packing in ("stream", "aligned"):
        module = LMDataModule(corpus, context=16, micro_batch=2, seed=1, packing=packing)
        assert next(iter(module.train_dataloader()))["tokens"].shape == (2, 16)
        assert list(module.val_dataloader())
    assert {path: path.stat().st_mtime_ns for path in prepared.folder.parent.rglob("*")} == before
    refused(lambda: corpus_of(documents[:50]), "cannot be written", os.strerror(code), "cache_dir=")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_a_folder_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    (tmp_path / "file").touch()
    data = {"path": str(tmp_path / "text.txt")}
    refused(lambda: build_corpus(data, BYTE, tmp_path / place), "file", "cannot be written", "cache_dir=")


def _forbid_writing(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    """Refuse what a read-only file system refuses (tests may run as root, whom permissions do not bind)."""
    import builtins

    real_open, real_os_open, real_mkdir = builtins.open, os.open, os.mkdir

    def inside(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder)

    def checked_open(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if inside(path) and set(mode) & set("wax+"):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, mode, *rest, **options)

    def checked_os_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if inside(path) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(code, os.strerror(code), str(path))
        return real_os_open(path, flags, *rest, **options)

    def checked_mkdir(path: Any, *rest: Any, **options: Any) -> None:
        if inside(path) and not Path(path).exists():
            raise OSError(code, os.strerror(code), str(path))
        real_mkdir(path, *rest, **options)

    monkeypatch.setattr(builtins, "open", checked_open)
    monkeypatch.setattr(os, "open", checked_os_open)
    monkeypatch.setattr(os, "mkdir", checked_mkdir)


# --- damaged caches ---------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest cut": lambda folder: _cut(folder / "manifest.json"),
    "manifest empty": lambda folder: (folder / "manifest.json").write_text(""),
    "manifest null": lambda folder: (folder / "manifest.json").write_text("null"),
    "manifest of nothing": lambda folder: (folder / "manifest.json").write_text("{}"),
    "manifest not UTF-8": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"),
    "manifest lies about tokens": lambda folder: _edit(folder / "manifest.json", '"tokens": ', '"tokens": 1'),
    "manifest lies about shards": lambda folder: _edit(folder / "manifest.json", '"shards": [', '"shards": [3,'),
    "section record cut": lambda folder: (_cut(folder / "section-00001.json"), _cut(folder / "train-00001.bin")),
    "section record of nothing": lambda folder: (
        (folder / "section-00001.json").write_text("{}"),
        _cut(folder / "train-00002.bin"),
    ),
    "section record without checksums": lambda folder: (
        _edit(folder / "section-00001.json", '"sha256"', '"md5"'),
        _cut(folder / "train-00002.bin"),
    ),
    "tokenizer cut": lambda folder: _cut(folder / "tokenizer" / "tokenizer.json"),
    "tokenizer description cut": lambda folder: _cut(folder / "tokenizer" / "polarlm_tokenizer.json"),
    "tokenizer changed": lambda folder: _edit(folder / "tokenizer" / "tokenizer.json", 'strip":false', 'strip":true'),
    "tokenizer gone": lambda folder: shutil.rmtree(folder / "tokenizer"),
    "shard cut": lambda folder: _cut(folder / "train-00000.bin"),
    "shard gone": lambda folder: (folder / "val-00000.docs").unlink(),
    "plan cut": lambda folder: (_cut(folder / "plan.json"), _cut(folder / "train-00001.bin")),
    "plan of nothing": lambda folder: ((folder / "plan.json").write_text("{}"), _cut(folder / "train-00001.bin")),
    "plan without a number": lambda folder: (
        _edit(folder / "plan.json", '"low": ', '"low": null, "was": '),
        _cut(folder / "train-00001.bin"),
    ),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt_as_it_was(
    documents: list[str], corpus_of: Build, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    corpus = corpus_of(documents, "bpe", section_bytes=10_000)
    intact = files(corpus.folder)
    DAMAGES[damage](corpus.folder)
    again = corpus_of(documents, "bpe", section_bytes=10_000)
    assert files(again.folder) == intact and again.folder == corpus.folder
    messages = capsys.readouterr().err.strip().splitlines()
    assert len(messages) == 1 and str(corpus.folder) in messages[0]


def test_a_damaged_packing_plan_is_made_again(documents: list[str], corpus_of: Build) -> None:
    store = corpus_of(documents).store("train")
    wanted = PackedSequences(store, 64, 1, "best_fit").rows(np.arange(50))[0]
    for damage in (_cut, lambda path: path.write_bytes(b""), lambda path: np.save(path, np.load(path)[:-1])):
        for name in ("begins", "lengths", "targets", "sequences"):
            (plan,) = (store.folder / "packed").iterdir()
            damage(plan / f"{name}.npy")
            assert np.array_equal(PackedSequences(store, 64, 1, "best_fit").rows(np.arange(50))[0], wanted)


# --- downloads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """(address, what it serves, what it was asked for); a path ending in .cut promises more than it sends."""
    served: dict[str, bytes] = {}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content = served.get(self.path, b"")
            if self.path == "/redirect":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) * (2 if self.path.endswith(".cut") else 1)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", served, asked
    http.shutdown()
    http.server_close()


def test_a_download_is_complete_checked_and_fetched_once(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path
) -> None:
    address, served, asked = server
    served["/text.txt"] = b"some text of a stranger " * 200
    sha256 = __import__("hashlib").sha256(served["/text.txt"]).hexdigest()
    data = {"name": "far", "url": f"{address}/text.txt?x=/../../y", "sha256": sha256}
    served["/text.txt?x=/../../y"] = served["/text.txt"]
    corpus = build_corpus(data, BYTE, tmp_path)
    assert build_corpus(data, BYTE, tmp_path).content == corpus.content and len(asked) == 1
    (tmp_path / "downloads" / "far-text.txt").write_bytes(b"damaged later")
    assert build_corpus(data, BYTE, tmp_path).content == corpus.content and len(asked) == 2
    assert {path.name for path in (tmp_path / "downloads").iterdir()} <= {"far-text.txt", "far-text.txt.lock"}


@pytest.mark.parametrize(
    ("path", "options", "part"),
    [
        ("/text.txt", {"sha256": "0" * 64}, "does not have the expected content"),
        ("/text.cut", {}, "broke off after"),
        ("/redirect", {}, "cannot be downloaded"),
    ],
)
def test_a_wrong_download_is_not_kept(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, path: str, options: dict[str, Any], part: str
) -> None:
    address, served, _ = server
    served["/text.txt"] = served["/text.cut"] = b"some text of a stranger " * 200
    refused(lambda: build_corpus({"name": "far", "url": address + path, **options}, BYTE, tmp_path), address, part)
    assert not [file for file in (tmp_path / "downloads").iterdir() if not file.name.endswith(".lock")]


def test_a_download_that_fills_the_disk_leaves_nothing(
    server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served, _ = server
    served["/text.txt"] = b"x" * 3_000_000
    monkeypatch.setattr(atomic_module, "free_bytes", lambda path: 1_000_000)
    FullDisk(monkeypatch, 0)
    data = {"name": "far", "url": f"{address}/text.txt"}
    refused(lambda: build_corpus(data, BYTE, tmp_path), "disk is full", "3.0 MB are needed, 1.0 MB are free")
    assert not [file for file in (tmp_path / "downloads").iterdir() if not file.name.endswith(".lock")]
