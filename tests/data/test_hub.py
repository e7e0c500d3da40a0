import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import polarlm.data.hub as hub
from polarlm.data import LMDataModule, build_corpus
from polarlm.errors import UserError

README = """---
configs:
- config_name: small-v1
  data_files:
  - {split: train, path: small-v1/train-*.parquet}
  - {split: validation, path: small-v1/validation-*.parquet}
---
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """data/raw/owner/name, laid out like a hub dataset: README.md and parquet shards of a configuration."""
    monkeypatch.setenv("POLARLM_SHARED_DATA", str(tmp_path / "raw"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "raw" / "owner" / "name"
    (folder / "small-v1").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for shard in range(2):
        rows = [" = Article = \n", f" text of article {shard}, long enough to be cut into windows of eight . \n"] * 5
        pq.write_table(pa.table({"text": rows}), folder / "small-v1" / f"train-0000{shard}.parquet")
    pq.write_table(
        pa.table({"text": [" = Other = \n", " held out . \n"]}), folder / "small-v1" / "validation-00000.parquet"
    )
    hub._load.cache_clear()
    return folder


def settings(**options: Any) -> dict[str, Any]:
    pinned = {
        "name": "owner/name",
        "config": "small-v1",
        "revision": "0" * 40,
        "splits": {"train": "train", "val": "validation"},
    }
    return {"name": "small", "hub": pinned | options.pop("hub", {}), "document_start": r"^ = [^=].* = \n?$"} | options


@pytest.mark.parametrize("fetch", ["download", "stream"])
def test_a_local_copy_of_a_hub_dataset_is_read_like_the_hub(repository: Path, tmp_path: Path, fetch: str) -> None:
    corpus = build_corpus(settings(hub={"fetch": fetch}), {"kind": "byte"}, tmp_path / "cache")
    assert corpus.store("train").documents == 10 and corpus.store("val").documents == 1
    assert corpus.tokenizer.decode(corpus.store("val")[:].tolist()) == " = Other = \n held out . \n"


def test_it_can_be_streamed_shard_by_shard(repository: Path, tmp_path: Path) -> None:
    corpus = build_corpus(settings(streaming=True), {"kind": "byte"}, tmp_path / "cache")
    assert corpus.stream is not None and [unit.name for unit in corpus.stream[0].units][:2] == [
        "owner/name:train:0",
        "owner/name:train:1",
    ]
    module = LMDataModule(corpus, context=8, micro_batch=2, seed=1)
    assert next(iter(module.train_dataloader()))["tokens"].shape == (2, 8)


def test_a_changed_copy_is_another_corpus(repository: Path, tmp_path: Path) -> None:
    before = build_corpus(settings(), {"kind": "byte"}, tmp_path / "cache").fingerprint
    rows = pa.table({"text": [" = New = \n", " something else entirely . \n"]})
    pq.write_table(rows, repository / "small-v1" / "train-00001.parquet")
    hub._load.cache_clear()
    assert build_corpus(settings(), {"kind": "byte"}, tmp_path / "cache").fingerprint != before


def test_a_wrong_column_or_split_is_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'body' \(it has: text\)"):
        build_corpus(settings(column="body"), {"kind": "byte"}, tmp_path / "cache")
    with pytest.raises(UserError, match=r"split 'dev' cannot be read from .*owner/name"):
        build_corpus(settings(hub={"splits": {"train": "train", "val": "dev"}}), {"kind": "byte"}, tmp_path / "cache")


def test_data_path_wins_over_the_hub(repository: Path, tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} of mine"}) + "\n")
    corpus = build_corpus(settings(path=f"{tmp_path}/*.jsonl"), {"kind": "byte"}, tmp_path / "cache")
    assert "train of mine" in corpus.tokenizer.decode(corpus.store("train")[:].tolist())


@pytest.mark.slow
def test_without_network_or_copy_the_message_says_what_to_do_soon(tmp_path: Path) -> None:
    code = (
        "from polarlm.data import build_corpus\n"
        "hub = dict(name='owner/absent', config='v1', revision='abc', splits={'train': 'train', 'val': 'validation'})\n"
        f"try: build_corpus(dict(name='absent', hub=hub), dict(kind='byte'), {str(tmp_path)!r})\n"
        "except ValueError as error: print(error)\n"
        f"try: build_corpus(dict(path={__file__!r}), dict(kind='hub', hub='owner/tokenizer'), {str(tmp_path)!r})\n"
        "except ValueError as error: print(error)\n"
    )
    # An address nobody answers at, as without network; asked for twice, waited for once.
    environment = {
        "PATH": "/usr/bin",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=300
    )
    data, tokenizer = done.stdout.strip().splitlines()
    assert "data/raw/owner/absent/" in data and "data.path=" in data and "data=pydocs" in data
    assert "data/raw/owner/tokenizer/tokenizer.json" in tokenizer and "tokenizer=bpe" in tokenizer
