"""Killed at every named point and at random times, started again by the same command: the same bits in the end.

POLARLM_FAULT_SEED repeats a printed seed (tests/seeds.py). POLARLM_KILLS=1000 is the nightly set.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.faults.killing import outcome, run
from tests.forks import forks
from tests.seeds import drawn_seed
from tests.training.tiny_jobs import composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
KILLS = int(os.environ.get("POLARLM_KILLS", "110"))
OPTIONS = (
    "trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.val_every=3", "trainer.log_every=2",
    "diagnostics=default", "diagnostics.every=3", "diagnostics.tokens=32", "model.dropout=0.1", "name=killed",
    "trainer.keep_checkpoints=2", "sample.tokens=5",
)  # fmt: skip


class Workshop:
    """Starts runs of one configuration, in folders of their own, from a process that has imported everything."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.context = forks()
        self.count = 0

    def config(self, runs: str) -> dict:
        return {**composed(self.place, *OPTIONS), "runs_dir": str(self.place / runs), "group": None}

    def start(self, runs: str, kill_at: str | None = None, notes: Path | None = None):
        log = str(self.place / f"{runs}.txt")
        arguments = (self.config(runs), log, kill_at, None if notes is None else str(notes))
        process = self.context.Process(target=run, args=arguments)
        process.start()
        return process

    def folder(self, runs: str) -> Path:
        return self.place / runs / "killed"

    def told(self, runs: str) -> str:
        return (self.place / f"{runs}.txt").read_text()[-4000:]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def reference(workshop):
    """An undisturbed run: its outcome, its points, its duration."""
    process = workshop.start("warm")  # the corpus is prepared, libraries are loaded
    process.join()
    began = time.monotonic()
    process = workshop.start("reference", notes=workshop.place / "points.json")
    process.join()
    assert process.exitcode == 0, workshop.told("reference")
    points = list(dict.fromkeys(json.loads((workshop.place / "points.json").read_text())))
    return outcome(workshop.folder("reference")), points, time.monotonic() - began


def finish_and_compare(workshop, runs: str, expected: dict, history: list[str]) -> None:
    process = workshop.start(runs)
    process.join()
    assert process.exitcode == 0, f"{history}\n{workshop.told(runs)}"
    compare(workshop, runs, expected, history)


def compare(workshop, runs: str, expected: dict, history: list[str]) -> None:
    actual = outcome(workshop.folder(runs))
    for what in expected:
        assert actual[what] == expected[what], (what, history)
    assert [p.name for p in (workshop.place / runs).iterdir() if not p.name.startswith(".")] == ["killed"], history


def test_killed_at_every_named_point(workshop, reference):
    """One run after another is killed at point after point and goes on; every few kills it is compared."""
    expected, points, _ = reference
    assert len(points) > 40, points
    seed = drawn_seed("POLARLM_FAULT_SEED")
    order = random.Random(seed).sample(points, len(points))
    kills, number, history = 0, 0, [f"seed {seed}"]
    for name in order:
        process = workshop.start(f"points-{number}", kill_at=name)
        process.join()
        history.append(name)
        if process.exitcode == -9:
            kills += 1
        else:  # a continued run does not pass this point (any more): it finished, the point gets a fresh run
            assert process.exitcode == 0, f"{history}\n{workshop.told(f'points-{number}')}"
            assert outcome(workshop.folder(f"points-{number}"))["weights"] == expected["weights"], history
            number, history = number + 1, [f"seed {seed}", name]
            process = workshop.start(f"points-{number}", kill_at=name)
            process.join()
            assert process.exitcode == -9, f"{name} is not reached\n{workshop.told(f'points-{number}')}"
            kills += 1
        if len(history) > 6:
            finish_and_compare(workshop, f"points-{number}", expected, history)
            number, history = number + 1, [f"seed {seed}"]
    finish_and_compare(workshop, f"points-{number}", expected, history)
    assert kills == len(points)


@pytest.mark.parametrize("name", ["after replace last.ckpt", "after unlink step_#.ckpt"])
def test_killed_at_one_point_whenever_it_is_reached(workshop, reference, name):
    """Also at the last checkpoint, after which nothing is saved that could make up for what was not done."""
    expected, points, _ = reference
    assert name in points
    runs, kills = f"again-{name.replace(' ', '-')}", 0
    while kills < 20:
        process = workshop.start(runs, kill_at=name)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -9, workshop.told(runs)
        kills += 1
    assert 2 <= kills < 20
    compare(workshop, runs, expected, [name] * kills)


def test_killed_at_random_times(workshop, reference):
    expected, points, seconds = reference
    seed = drawn_seed("POLARLM_FAULT_SEED")
    numbers, number, history = random.Random(seed), 0, [f"seed {seed}"]
    kills, wanted = 0, max(10, KILLS - len(points))
    while kills < wanted:
        began = time.monotonic()
        process = workshop.start(f"random-{number}")
        process.join(numbers.uniform(0.0, seconds))
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            history.append("killed")
            print(f"{kills} kills", flush=True)
        else:
            seconds = (seconds + time.monotonic() - began) / 2  # the machine may be busier or idler than before
            assert process.exitcode == 0, f"{history}\n{workshop.told(f'random-{number}')}"
        summary = workshop.folder(f"random-{number}") / "summary.json"
        if summary.exists() and json.loads(summary.read_text())["status"] == "finished":  # or killed on its way out
            assert outcome(workshop.folder(f"random-{number}"))["weights"] == expected["weights"], history
            number, history = number + 1, [f"seed {seed}"]
            continue
        if len(history) > 8:
            finish_and_compare(workshop, f"random-{number}", expected, history)
            number, history = number + 1, [f"seed {seed}"]
    finish_and_compare(workshop, f"random-{number}", expected, history)
