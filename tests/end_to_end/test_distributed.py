"""Two processes on one CPU (gloo): one run folder, the same global batches, the same losses to rounding."""

import json
import os
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import ROOT

pytestmark = pytest.mark.slow


def launch(workshop, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), *workshop.tiny(), "model.dropout=0", *arguments]
    return subprocess.run(command, cwd=workshop.folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def alone(workshop):
    assert workshop.train("name=alone", "model.dropout=0").code == 0
    return workshop.rows("alone")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one(workshop, alone, strategy):
    done = launch(workshop, f"trainer={strategy}", "trainer.devices=2", f"name={strategy}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sample") == 1  # one table, from one process
    both = workshop.rows(strategy)
    assert [row["step"] for row in both] == [row["step"] for row in alone]
    for one, two in zip(alone, both):
        for key in ("train/loss", "val/loss"):
            if key in one:
                assert two[key] == pytest.approx(one[key], abs=2e-4), (key, one["step"])
    assert sorted(p.name for p in (workshop.folder / "runs").glob(f"{strategy}*")) == [strategy]
    # Rank 0 probes, with the other rank's shards under FSDP: before training moves the weights, to the last bit.
    assert probes(workshop, strategy)[0] == probes(workshop, "alone")[0]
    assert [probe["step"] for probe in probes(workshop, strategy)] == [0, 8, 16, 24]


def probes(workshop, name: str) -> list[dict]:
    lines = (workshop.folder / "runs" / name / "diagnostics" / "probe.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
