"""Runs of two processes that are killed, and go on with as many processes as before, with fewer or with more."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from polarlm.runs.checkpoints import load_head, load_verified
from polarlm.runs.restore import restore_run
from polarlm.runs.shards import Shards
from polarlm.runs.tensor_files import DamagedCheckpoint
from tests.faults.killing import outcome
from tests.faults.ranks import Ranks
from tests.seeds import drawn_seed
from tests.training.tiny_jobs import composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a hang, not a busy machine
OPTIONS = (
    "trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.val_every=3", "trainer.log_every=1",
    "diagnostics=default", "diagnostics.every=3", "diagnostics.tokens=32", "name=run", "block=polar",
    "trainer.keep_checkpoints=2", "sample.tokens=5",
)  # fmt: skip
FIRST_CHECKPOINT = "after replace last.ckpt"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def settings(place: Path, runs: str, strategy: str, count: int, *more: str) -> dict[str, Any]:
    where = (f"trainer.strategy={strategy}", f"trainer.devices={count}", *more)
    return {**composed(place, *OPTIONS, *where), "runs_dir": str(place / runs), "group": None}


def train(place: Path, runs: str, strategy: str, count: int, *more: str, **options: Any) -> Path:
    ranks = Ranks(settings(place, runs, strategy, count, *more), count, place / runs, **options)
    codes = ranks.join()
    expected = -9 if "kill_at" in options else 0
    assert codes[0] == expected, f"{codes}\n{ranks.told()}"
    return place / runs / "run"


def losses(folder: Path) -> dict[tuple[int, str], float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], key): row[key] for row in rows for key in ("train/loss", "val/loss") if key in row}


@pytest.fixture(scope="module")
def alone(place) -> dict[tuple[int, str], float]:
    return losses(train(place, "alone", "auto", 1))


CHANGES = [("ddp", 2, "auto", 1), ("auto", 1, "ddp", 2), ("fsdp", 2, "auto", 1), ("auto", 1, "fsdp", 2),
           ("ddp", 2, "fsdp", 2), ("fsdp", 2, "fsdp", 1)]  # fmt: skip


@pytest.mark.parametrize(("strategy", "count", "next_strategy", "next_count"), CHANGES)
def test_a_killed_run_goes_on_with_another_number_of_processes(
    place, alone, strategy, count, next_strategy, next_count
):
    """The batch is fixed in tokens, so every step reads the same text and the losses agree to rounding."""
    runs = f"{strategy}-{count}-{next_strategy}-{next_count}"
    folder = train(place, runs, strategy, count, kill_at=FIRST_CHECKPOINT)
    assert (folder / "checkpoints" / "shards").exists() == (strategy == "fsdp")
    assert restore_run(folder).weights.name == "step_00000002.ckpt"  # by this one process, of an interrupted run
    # While a checkpoint is verified training goes on: rows after its step are of a part that is trained again.
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    before = "".join(row for row in rows if json.loads(row)["step"] <= 2)
    assert len(before.splitlines()) == 2
    train(place, runs, next_strategy, next_count)
    assert (folder / "metrics.jsonl").read_text().startswith(before)  # it went on, it did not begin again
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert losses(folder) == pytest.approx(alone, abs=2e-5)


def test_killed_fsdp_runs_end_with_the_same_bits(place):
    """At named points of rank 0, at random times of any rank, and with a damaged newest checkpoint."""
    dropout = "model.dropout=0.1"
    notes = place / "points.json"
    began = time.monotonic()
    expected = outcome(train(place, "sharded", "fsdp", 2, dropout, notes=str(notes)))
    seconds = time.monotonic() - began
    seed = drawn_seed("POLARLM_FAULT_SEED")
    numbers = random.Random(seed)
    history = [f"seed {seed}"]
    of_checkpoints = [p for p in dict.fromkeys(json.loads(notes.read_text())) if "ckpt" in p or "step_" in p]
    between = [(0, "after replace weights_#.safetensors"), (1, "before replace optimiser_#.safetensors")]
    folder = place / "killed" / "run"
    # Twice after a checkpoint: one of the two is damaged below, and the other is what the run then goes on from.
    saved, somewhere = (0, FIRST_CHECKPOINT), (0, numbers.choice(of_checkpoints))
    for rank, point in (numbers.choice(between), saved, somewhere, saved):
        if is_finished(folder):  # it did not pass the point before
            break
        ranks = Ranks(settings(place, "killed", "fsdp", 2, dropout), 2, place / "killed", point, rank)
        codes = ranks.join()
        history.append(f"{point} of rank {rank}: {codes}")
        assert ranks.lost_only(rank), f"{history}\n{ranks.told()}"
    if not is_finished(folder):
        newest = max((folder / "checkpoints").glob("step_*.ckpt"))
        shards = Shards(newest, load_head(newest)).folder  # its name has a number when the step was saved twice
        damage(numbers.choice([newest, *shards.iterdir()]))
        with pytest.raises(DamagedCheckpoint):
            load_verified(newest)
        # Back where it was, and killed before that is called the last checkpoint: the damaged one still is.
        ranks = Ranks(settings(place, "killed", "fsdp", 2, dropout), 2, place / "killed", "after replace step_#.ckpt")
        history.append(f"damaged, then killed before a checkpoint got its name: {ranks.join()}")
        assert ranks.lost_only(0), f"{history}\n{ranks.told()}"
    for _ in range(2):
        if is_finished(folder):
            break
        ranks = Ranks(settings(place, "killed", "fsdp", 2, dropout), 2, place / "killed")
        when = numbers.randrange(2), numbers.uniform(0.3, 0.9) * seconds
        history.append(f"rank and time {when}: {ranks.join(kill_after=when)}")
    if not is_finished(folder):
        train(place, "killed", "fsdp", 2, dropout)
    actual = outcome(folder)
    for what in expected:
        assert actual[what] == expected[what], (what, history)
    assert [p.name for p in folder.parent.iterdir()] == ["run"], history


def is_finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def damage(path: Path) -> None:
    """Invert some bytes in the middle of a file, under all its names; more than the gaps between its records."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 300] = bytes(255 - byte for byte in content[middle : middle + 300])
    path.write_bytes(content)
