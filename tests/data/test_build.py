import json
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from polarlm.data import Corpus, build_corpus
from polarlm.data.store import paragraphs
from polarlm.errors import UserError
from tests.data.conftest import made_up_documents

FORK = multiprocessing.get_context("fork")  # a spawned child would spend the test's time importing


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build(path: Path, cache: Path, kind: str = "bpe", **options: Any) -> Corpus:
    tokenizer = {"kind": kind} | ({"vocab_size": 320} if kind == "bpe" else {})
    data = {"path": str(path), "split": {"rule": "hash", "val": 0.1, "test": 0.1}} | options
    return build_corpus(data, tokenizer, cache, section_bytes=30_000)


def content(corpus: Corpus) -> dict[str, bytes]:
    return {str(p.relative_to(corpus.folder)): p.read_bytes() for p in sorted(corpus.folder.rglob("*")) if p.is_file()}


def files_in_progress(cache: Path) -> int:
    try:
        return sum(len(os.listdir(partial)) for partial in cache.glob("*.partial"))
    except FileNotFoundError:  # renamed in this very moment
        return 0


@pytest.mark.slow
def test_killed_twenty_times_and_restarted_gives_the_same_store(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "documents.jsonl", made_up_documents(450))
    undisturbed = content(build(path, tmp_path / "undisturbed"))
    assert len(undisturbed) > 20
    chance, interrupted = random.Random(1), 0
    for attempt in range(20):
        cache = tmp_path / f"killed-{attempt}"
        child = FORK.Process(target=build, args=(path, cache))
        child.start()
        # A random amount of progress, then a random instant: the same moments on a fast and on a slow machine.
        progress = chance.randint(0, len(undisturbed))
        while child.is_alive() and files_in_progress(cache) < progress:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.005))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        interrupted += not any(cache.glob("text-*/manifest.json"))
        assert content(build(path, cache)) == undisturbed
    assert interrupted >= 10  # otherwise the kills came too late to prove anything


def test_a_half_written_section_is_not_trusted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "documents.jsonl", made_up_documents(400))
    finished = build(path, tmp_path / "cache")
    expected = content(finished)
    partial = finished.folder.with_name(finished.folder.name + ".partial")
    finished.folder.rename(partial)
    (partial / "manifest.json").unlink()
    (partial / "section-00001.json").unlink()
    (partial / "train-00002.bin").write_bytes(b"torn")
    (partial / "train-00003.bin.tmp").write_bytes(b"left over")
    again = content(build(path, tmp_path / "cache"))
    # The leakage report was made from hashes that are gone with the finished store; everything else is the same.
    assert {name: raw for name, raw in again.items() if name != "manifest.json"} == {
        name: raw for name, raw in expected.items() if name != "manifest.json"
    }


def test_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "documents.jsonl", made_up_documents(600))
    one, many = (content(build(path, tmp_path / f"cache-{n}", workers=n)) for n in (1, 4))
    assert one == many


def _prepare_and_report(path: Path, cache: Path, report: Any) -> None:
    import polarlm.data.corpus as module

    real, built = module.build_sections, []

    def slow(*given: Any, **options: Any) -> Any:
        built.append(True)
        time.sleep(0.5)
        return real(*given, **options)

    module.build_sections = slow
    corpus = build(path, cache)
    report.put((len(built), corpus.fingerprint, corpus.store("train").fingerprint))


def test_of_two_processes_one_builds_and_one_waits(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "documents.jsonl", made_up_documents(300))
    report = FORK.Queue()
    children = [FORK.Process(target=_prepare_and_report, args=(path, tmp_path / "cache", report)) for _ in range(2)]
    for child in children:
        child.start()
    results = sorted(report.get(timeout=500) for _ in children)
    for child in children:
        child.join()
    assert [builds for builds, *_ in results] == [0, 1] and results[0][1:] == results[1][1:]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = made_up_documents(50)
    corpus = build(jsonl(tmp_path / "holes.jsonl", ["", *texts, "", ""]), tmp_path / "cache")
    plain = build(jsonl(tmp_path / "plain.jsonl", texts), tmp_path / "cache")
    assert corpus.manifest["empty_documents"] == 3
    assert corpus.store("train").fingerprint == plain.store("train").fingerprint


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_corpus_without_text_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match="There is no text in"):
        build(jsonl(tmp_path / "nothing.jsonl", texts), tmp_path / "cache", split={"rule": "position"})
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_a_corpus_too_small_for_its_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs more documents"):
        build(jsonl(tmp_path / "two.jsonl", ["a", "b"]), tmp_path / "cache")
    with pytest.raises(UserError, match=r"The train split of .* is empty"):
        build(jsonl(tmp_path / "one.jsonl", ["a"]), tmp_path / "cache", split={"rule": "position", "val": 0.1})


@pytest.mark.slow
def test_a_document_of_50_megabytes_is_one_document(tmp_path: Path) -> None:
    line = "All work and no play makes a dull corpus, said the 1st owl.\n"
    path = tmp_path / "huge.txt"
    path.write_text(line * (50_000_000 // len(line)))
    corpus = build_corpus({"path": str(path), "split": {"val": 0.01}}, {"kind": "byte"}, tmp_path / "cache")
    train = corpus.store("train")
    assert train.documents == 1 and train.bytes + corpus.store("val").bytes == path.stat().st_size
    assert bytes(train[10_000_000 : 10_000_000 + len(line)].astype("u1")).decode() in line * 2


def _peak_memory(path: Path, cache: Path, report: Any) -> None:
    import polarlm.data.store

    polarlm.data.store.CHUNK_CHARS = 1 << 18  # so that a small corpus already fills the queue
    build_corpus({"path": str(path), "workers": 2}, {"kind": "byte"}, cache, section_bytes=4 << 20)
    report.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    texts = made_up_documents(1000, longest=900)
    peaks = []
    for times in (1, 10):
        path = tmp_path / f"{times}.jsonl"
        with open(path, "w") as file:
            for again in range(times):
                file.writelines(json.dumps({"text": f"{again} {text}"}) + "\n" for text in texts)
        report = FORK.Queue()
        child = FORK.Process(target=_peak_memory, args=(path, tmp_path / f"cache-{times}", report))
        child.start()
        peaks.append(report.get(timeout=500))
        child.join()
    # 2 MB against 23 MB of text; ru_maxrss is in KiB.
    assert peaks[1] - peaks[0] < 12_000, peaks


def test_leakage_is_found_across_sections(tmp_path: Path) -> None:
    train = made_up_documents(400)
    # From the first, a middle and the last section of train; val itself spans several sections.
    copied = [train[0], train[200], train[399]]
    fresh = [f"Fresh {number}. {text}" for number, text in enumerate(made_up_documents(300, seed=9))]
    fresh[150] += "\n\n" + "y" * 70
    train[300] += "\n\n" + "y" * 70  # one paragraph of train inside a document of its own
    val = fresh[:100] + copied[:1] + fresh[100:200] + copied[1:] + fresh[200:]
    texts = tmp_path / "texts"
    texts.mkdir()
    jsonl(texts / "train.jsonl", train)
    jsonl(texts / "valid.jsonl", val)
    corpus = build(texts, tmp_path / "cache", "byte", split={"rule": "own"})
    assert min(len(corpus.manifest["splits"][split]["shards"]) for split in ("train", "val")) > 2
    leakage = corpus.manifest["leakage"]["val"]
    assert leakage["documents"] == {"checked": 303, "in_train": 3}
    seen = {paragraph for text in train for paragraph in paragraphs(text)}
    blocks = [paragraph for text in val for paragraph in paragraphs(text)]
    wanted = {"checked": len(blocks), "in_train": sum(block in seen for block in blocks)}
    assert leakage["paragraphs"] == wanted and wanted["in_train"] >= 4
