"""The hub path end to end against a hub on loopback: a good dataset, and what goes wrong with the others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.loopback_hub import SHA, LoopbackHub

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def repository(folder: Path, column: str = "text", splits: tuple[str, ...] = ("train", "validation")) -> Path:
    (folder / "data").mkdir(parents=True)
    for split in splits:
        rows = [f"{split} document {number} with words enough for a window" for number in range(40)]
        for shard in range(2):
            table = pa.table({column: rows[20 * shard : 20 * shard + 20]})
            pq.write_table(table, folder / "data" / f"{split}-0000{shard}-of-00002.parquet")
    return folder


def environment(hub: LoopbackHub, home: Path) -> dict[str, str]:
    online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    return {**os.environ, **online, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}


BUILD = """
import json, sys
from polarlm.data import build_corpus
from polarlm.errors import UserError
answers = []
for name, options in json.loads(sys.argv[1]):
    hub = {"name": name, "revision": sys.argv[3], "splits": {"train": "train", "val": "validation"}}
    try:
        corpus = build_corpus({"name": "small", "hub": hub | options}, {"kind": "byte"}, sys.argv[2])
        shards = len(corpus.manifest["units"])
        first = corpus.tokenizer.decode(corpus.store("val")[:21].tolist())
        answers.append([corpus.store("train").documents, shards, first])
    except UserError as error:
        answers.append(str(error))
print("ANSWERS" + json.dumps(answers))
"""


def built(hub: LoopbackHub, tmp_path: Path, *wanted: tuple[str, dict[str, Any]]) -> list[Any]:
    command = [sys.executable, "-c", BUILD, json.dumps(wanted), str(tmp_path / "cache"), SHA]
    env = environment(hub, tmp_path / "hf")
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWERS")[2])


def test_good_streamed_gated_renamed_and_incomplete_datasets(tmp_path: Path) -> None:
    repositories = {
        "owner/good": repository(tmp_path / "good"),
        "owner/streamed": tmp_path / "good",
        "owner/gated": tmp_path / "good",
        "owner/renamed": repository(tmp_path / "renamed", column="body"),
        "owner/untrained": repository(tmp_path / "untrained", splits=("test",)),
    }
    with LoopbackHub(repositories, gated=("owner/gated",)) as hub:
        options: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in [*repositories, "owner/absent"]]
        options[1] = ("owner/streamed", {"fetch": "stream"})
        good, streamed, gated, renamed, untrained, absent = built(hub, tmp_path, *options)
    assert good == [40, 2, "validation document 0"]
    assert streamed == [40, 4, "validation document 0"]  # two shards of each split, read one by one
    assert "/datasets/owner/gated" in gated and "hf auth login" in gated
    assert "no column 'text' (it has: body); set data.column" in renamed
    assert "split 'train' cannot be read" in untrained and "['test']" in untrained and "data.hub.splits" in untrained
    assert "owner/absent" in absent and "data/raw/owner/absent" in absent


def test_an_interrupted_download_is_never_taken_for_the_whole(tmp_path: Path) -> None:
    with LoopbackHub({"owner/good": repository(tmp_path / "good")}, broken=1) as hub:
        first = built(hub, tmp_path, ("owner/good", {}))[0]
        second = built(hub, tmp_path, ("owner/good", {}))[0]
    # The client resumes by itself, or says so; the same command again has every document.
    assert first == [40, 2, "validation document 0"] or "owner/good" in first
    assert second == [40, 2, "validation document 0"] and hub.broken == 0


def test_a_dataset_of_the_hub_trains(tmp_path: Path) -> None:
    with LoopbackHub({"owner/good": repository(tmp_path / "good")}) as hub:
        options = [
            "data=hub", "data.hub.name=owner/good", f"data.hub.revision={SHA}",
            "data.hub.splits.val=validation", "tokenizer=byte", "model.d_model=16", "model.n_layer=1",
            "model.n_head=2", "model.context=16", "trainer.max_steps=3", "trainer.batch_tokens=32", "logger=none",
            f"runs_dir={tmp_path}/runs", f"cache_dir={tmp_path}/cache", "name=hub",
        ]  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), *options]
        env = environment(hub, tmp_path / "hf")
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "runs" / "hub" / "summary.json").read_text())["status"] == "finished"
