import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polarlm.data.streaming as streaming
from polarlm.data import LMDataModule, build_corpus
from polarlm.data.source import SplitReader
from polarlm.errors import UserError
from tests.data.conftest import made_up_documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = made_up_documents(600)
    (tmp_path / "shards").mkdir()
    for shard in range(3):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[shard * 200 : (shard + 1) * 200])
        (tmp_path / "shards" / f"{shard}.jsonl").write_text("".join(lines))
    return tmp_path


def module_of(folder: Path, **options: Any) -> LMDataModule:
    data = {"path": str(folder / "shards"), "split": {"rule": "hash", "val": 0.1}, "streaming": True} | options
    corpus = build_corpus(data, {"kind": "byte"}, folder / "cache")
    return LMDataModule(corpus, context=32, micro_batch=4, seed=1, mask_documents=True)


def test_the_stream_is_the_train_split_of_all_shards(folder: Path) -> None:
    module = module_of(folder, stream_head_bytes=20_000)
    assert module.corpus.store("train").bytes < 30_000 and "val" in module.corpus.splits
    assert module.corpus.stream is not None
    train = [piece.text for piece in SplitReader(*module.corpus.stream) if piece.split == "train"]
    assert 400 < len(train) < 590
    wanted = np.concatenate([np.append(np.frombuffer(text.encode(), np.uint8).astype(int), 256) for text in train])
    count = len(wanted) // 32
    assert np.array_equal(module.sequences().rows(np.arange(count))[0].flatten(), wanted[: count * 32])


def test_going_back_and_resuming_give_the_same_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_REMEMBER_EVERY", 2000)
    sequences = module_of(folder).sequences()
    forward = [sequences.rows(np.arange(n, n + 4)) for n in range(0, 400, 4)]
    index = module_of(folder).corpus.folder / "stream.jsonl"
    assert len(index.read_text().splitlines()) > 3
    with open(index, "a") as file:
        file.write('{"tokens": 99')  # a killed run's last line
    (index.parent / "plan.json").write_text("{}")  # damaged: it is made again from the text
    later = module_of(folder).sequences()
    for number in (300, 40, 396):
        again = later.rows(np.arange(number, number + 4))
        assert all(np.array_equal(a, b) for a, b in zip(again, forward[number // 4]))


def test_counting_ahead_changes_no_rows(folder: Path) -> None:
    plain, counting = module_of(folder).sequences(), module_of(folder).sequences()
    for step in range(0, 320, 32):
        numbers = np.arange(step, step + 32)
        counts = counting.counted(numbers)
        targets = np.concatenate([counting.rows(numbers[at : at + 4])[1] for at in range(0, 32, 4)])
        assert np.array_equal(targets, plain.rows(numbers)[1])
        assert np.array_equal(counts, (targets != -100).sum(1)) and counts.min() < 32


def test_the_stream_repeats_when_it_ends(folder: Path) -> None:
    sequences = module_of(folder).sequences()
    period = len(module_of(folder).corpus.store("train"))  # the head holds everything here
    tokens = np.concatenate([sequences.rows(np.arange(n, n + 1))[0][0] for n in range(3 * period // 64)])
    assert np.array_equal(tokens[: len(tokens) - period], tokens[period:])


def test_what_a_stream_cannot_do_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"rule=own or hash"):
        module_of(folder, split={"rule": "position", "val": 0.1})
    with pytest.raises(UserError, match=r"data.packing=best_fit needs a prepared corpus"):
        LMDataModule(module_of(folder).corpus, context=8, micro_batch=1, seed=1, packing="best_fit")


def test_several_processes_are_refused_in_one_sentence(folder: Path) -> None:
    """Each would tokenise the whole stream."""
    from polarlm.training.job import refuse_shared_stream

    refuse_shared_stream(module_of(folder).corpus, 1)
    with pytest.raises(UserError, match=r"data\.streaming=true with 8 processes.*data\.streaming=false"):
        refuse_shared_stream(module_of(folder).corpus, 8)
