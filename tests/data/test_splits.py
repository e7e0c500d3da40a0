from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlm.data.config import DataConfig, SplitConfig, read_data_config
from polarlm.data.source import Source, SplitPlan, SplitReader, open_source, plan_splits
from polarlm.errors import UserError
from tests.data.conftest import made_up_documents

Write = Callable[[list[str]], Path]


def source_of(path: Path, **options: Any) -> Source:
    return open_source(DataConfig(path=str(path), **options), path)


def split(source: Source, **options: Any) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for piece in SplitReader(source, plan_splits(source, SplitConfig(**options))):
        parts[str(piece.split)].append(piece.text)
    return parts


def test_duplicates_never_cross_a_hash_split(folder_of: Write) -> None:
    texts = made_up_documents(300)
    again = [f"{text.replace(' ', '  ')}\n" for text in texts]  # with other white space
    parts = split(source_of(folder_of(texts + again)), rule="hash", val=0.2, test=0.2)
    keys = {name: {" ".join(text.split()) for text in group} for name, group in parts.items()}
    assert not keys["train"] & keys["val"] and not keys["train"] & keys["test"] and not keys["val"] & keys["test"]
    assert sum(map(len, keys.values())) == 300 and sum(map(len, parts.values())) == 600


def test_a_document_keeps_its_split_when_others_are_added(folder_of: Write) -> None:
    texts = made_up_documents(1150, longest=5)
    before = split(source_of(folder_of(texts[:1050])), rule="hash", val=0.1)
    after = split(source_of(folder_of(texts)), rule="hash", val=0.1)
    assert set(before["val"]) <= set(after["val"]) and set(before["train"]) <= set(after["train"])


def test_few_documents_still_fill_every_split(folder_of: Write) -> None:
    parts = split(source_of(folder_of(made_up_documents(12))), rule="hash", val=0.01, test=0.01)
    assert [len(parts[name]) for name in ("train", "val", "test")] == [10, 1, 1]


def test_one_document_is_cut_by_position_between_characters(tmp_path: Path) -> None:
    text = "ä" * 1000
    (tmp_path / "one.txt").write_text(text)
    texts = {name: "".join(parts) for name, parts in split(source_of(tmp_path / "one.txt"), val=0.1001).items()}
    assert texts["train"] + texts["val"] == text and len(texts["val"]) == 101 and not texts["test"]


def test_the_three_parts_of_one_document_follow_each_other_and_do_not_overlap(tmp_path: Path) -> None:
    text = "".join(f"{number:03}," for number in range(500))
    (tmp_path / "one.txt").write_text(text)
    parts = split(source_of(tmp_path / "one.txt"), rule="position", val=0.1, test=0.2)
    texts = ["".join(parts[name]) for name in ("train", "val", "test")]
    assert "".join(texts) == text and [len(part) for part in texts] == [1400, 200, 400]


def test_own_splits_win_and_are_demanded_by_rule_own(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("t")
    (tmp_path / "valid.txt").write_text("v")
    assert split(source_of(tmp_path)) == {"train": ["t"], "val": ["v"], "test": []}
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(UserError, match="rule=own found files or splits for None, but train and val are needed"):
        split(source_of(tmp_path), rule="own")
    (tmp_path / "test.txt").write_text("t")
    # Dividing anew would train on the test file.
    with pytest.raises(UserError, match="rule=auto found files or splits for test, train"):
        split(source_of(tmp_path))


def test_a_byte_limit_holds_for_every_own_split(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i:04d}"}}\n' for i in range(100)))
    parts = split(source_of(tmp_path, max_bytes=200))
    assert [len(parts["train"]), len(parts["val"])] == [20, 20]


@pytest.mark.parametrize("limit", [1, 100, 101, 102, 103, 5000, 2_500_000])
def test_a_byte_limit_cuts_a_single_long_document(tmp_path: Path, limit: int) -> None:
    text = "naïve 北京 " * 300_000  # several pieces
    (tmp_path / "one.txt").write_text(text)
    source = source_of(tmp_path / "one.txt", max_bytes=limit)
    pieces = list(SplitReader(source, SplitPlan("position", 10**9, 10**9)))
    read = "".join(piece.text for piece in pieces)
    assert text.startswith(read) and limit - 3 < len(read.encode()) <= limit
    assert pieces[-1].last and not any(piece.last for piece in pieces[:-1])


def test_a_byte_limit_cuts_the_last_of_several_documents_and_reads_no_further_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i:04d}"}}\n' for i in range(100)))
    source = source_of(tmp_path, max_bytes=303)
    pieces = list(SplitReader(source, SplitPlan("own")))
    assert [piece.text for piece in pieces] == [f"a {i:04d}" for i in range(50)] + ["a 0"]


def test_reading_on_from_any_state_gives_the_rest(folder_of: Write) -> None:
    source = source_of(folder_of(made_up_documents(40)))
    plan = plan_splits(source, SplitConfig(rule="position", val=0.3, test=0.2))
    reader = SplitReader(source, plan)
    seen, places = [], []
    for piece in reader:
        seen.append(piece)
        if reader.at_piece_end:
            places.append((len(seen), reader.state))
    for count, state in places:
        assert list(SplitReader(source, plan, state)) == seen[count:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pth": "x"}, r"data.pth is not an option. Did you mean path"),
        ({"split": {"rulle": "own"}}, "data.split.rulle is not an option. Did you mean rule"),
        ({"split": {"rule": "random"}}, "Choose one of auto, own, hash, position"),
        ({"split": {"val": 0.7, "test": 0.4}}, "sum must be below 1"),
        ({"packing": "tight"}, "Choose one of stream, aligned, best_fit"),
    ],
)
def test_wrong_options_name_the_right_ones(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_data_config(options)
