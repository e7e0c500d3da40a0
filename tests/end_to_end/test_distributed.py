"""Two processes on one CPU (gloo): one run folder, the same global batches, the same losses to rounding.

Started by Lightning, by torchrun, and as SLURM would start them on two machines.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import ROOT, Done
from tests.ports import held_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a hang, not a busy machine
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_")


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def command(workshop, *arguments: str) -> list[str]:
    return [str(ROOT / "train.py"), *workshop.tiny(), "model.dropout=0", *arguments]


def run(workshop, *arguments: str) -> Done:
    """The command in a process that is forked; the ones that it starts are not."""
    with held_port() as port:
        process = workshop.start(*arguments, PYTHONPATH=str(ROOT), MASTER_PORT=str(port))
        return workshop.wait(process, timeout=1500)


@pytest.fixture(scope="module")
def alone(workshop):
    assert workshop.train("name=alone", "model.dropout=0").code == 0
    return workshop.rows("alone")


def assert_like(rows: list[dict], alone: list[dict]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in alone]
    for one, two in zip(alone, rows):
        for key in ("train/loss", "val/loss"):
            if key in one:
                assert two[key] == pytest.approx(one[key], abs=2e-4), (key, one["step"])


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(workshop, request):
    """A finished run of two processes that Lightning started."""
    strategy = request.param
    done = run(workshop, *command(workshop, f"trainer={strategy}", "trainer.devices=2", f"name={strategy}"))
    assert done.code == 0, done.out
    assert done.out.count("unigram baseline") == 1  # one table, from one process
    return strategy


def test_two_processes_equal_one(workshop, alone, together):
    assert_like(workshop.rows(together), alone)
    assert sorted(p.name for p in (workshop.folder / "runs").glob(f"{together}*")) == [together]
    # Rank 0 probes, with the other rank's shards under FSDP: before training moves the weights, to the last bit.
    assert probes(workshop, together)[0] == probes(workshop, "alone")[0]
    assert [probe["step"] for probe in probes(workshop, together)] == [0, 8, 16, 24]


def test_a_run_of_two_processes_is_used_like_any_other(workshop, together):
    """Whole or in shards (FSDP): one process evaluates, generates and exports it, with the same numbers."""
    from polarlm.runs.checkpoints import load_verified

    folder = workshop.folder / "runs" / together
    state = load_verified(folder / "checkpoints" / "last.ckpt")
    assert state["state_dict"]["model.embedding.weight"].shape == (257, 32)  # not a shard
    assert (folder / "checkpoints" / "shards").exists() == (together == "fsdp")
    losses = []
    for file in (folder, folder / "checkpoints" / "last.ckpt"):
        done = workshop.run("eval.py", f"checkpoint={file}", "split=val", "out=again.json", "--trust-data")
        assert done.code == 0, done.out
        again = json.loads((workshop.folder / "again.json").read_text())
        losses.append(again["val/loss"])
    assert losses[0] == losses[1] == pytest.approx(workshop.summary(together)["val/loss"], abs=1e-5)
    for verb in (["generate", "--tokens", "5"], ["export", "--out", f"{workshop.folder}/{together}-hf"], ["inspect"]):
        done = workshop.run("polarlm/__main__.py", verb[0], str(folder), *verb[1:])
        assert done.code == 0, done.out
    assert (workshop.folder / f"{together}-hf" / "model.safetensors").exists()


def test_ranks_with_unequal_counts_weigh_by_their_tokens(workshop):
    """Aligned documents leave some windows half empty: the mean is over targets, not over ranks."""
    options = ("data.packing=aligned", "data.mask_documents=true", "data.document_separator='\n\n'")
    whole = "trainer.micro_batch_tokens=256"  # one process takes the step uncut, two take half of it each
    done = workshop.train("name=aligned-alone", "model.dropout=0", whole, *options)
    assert done.code == 0, done.out
    two = run(workshop, *command(workshop, "trainer=ddp", "trainer.devices=2", "name=aligned-ddp", *options))
    assert two.code == 0, two.out
    alone, together = (
        [row["train/loss"] for row in workshop.rows(name) if "train/loss" in row]
        for name in ("aligned-alone", "aligned-ddp")
    )
    assert together == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_on_one_machine(workshop, alone, strategy):
    import torch.distributed.run as torchrun

    launcher = [torchrun.__file__, "--standalone", "--nproc-per-node=2"]
    name = f"torchrun-{strategy}"
    done = run(workshop, *launcher, *command(workshop, f"trainer={strategy}", "trainer.devices=2", f"name={name}"))
    assert done.code == 0, done.out
    assert_like(workshop.rows(name), alone)
    assert sorted(p.name for p in (workshop.folder / "runs").glob(f"{name}*")) == [name]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_slurm_with_two_machines(workshop, alone, strategy):
    """Both tasks as srun starts them with --nodes=2 --ntasks-per-node=1; here both machines are this one.

    The first is forked, the second is not.
    """
    name = f"slurm-{strategy}"
    job = {
        "SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "polarlm", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "localhost", "SLURM_LOCALID": "0",
    }  # fmt: skip
    settings = command(workshop, f"trainer={strategy}", "trainer.devices=1", "trainer.nodes=2", f"name={name}")
    path = workshop.folder / f"{name}-1.txt"
    with held_port() as port, open(path, "w") as log:
        job["MASTER_PORT"] = str(port)
        second = environment(**job, SLURM_PROCID="1", SLURM_NODEID="1")
        place = {"cwd": workshop.folder, "env": second, "stdout": log, "stderr": subprocess.STDOUT}
        other = subprocess.Popen([sys.executable, *settings], **place)
        first = workshop.wait(workshop.start(*settings, **job, SLURM_PROCID="0", SLURM_NODEID="0"), timeout=1500)
        code = other.wait(1500)
    assert [first.code, code] == [0, 0], first.out + path.read_text()
    assert_like(workshop.rows(name), alone)
    assert not list((workshop.folder / "runs" / ".slurm").iterdir())  # the note for the other task is gone


def probes(workshop, name: str) -> list[dict]:
    lines = (workshop.folder / "runs" / name / "diagnostics" / "probe.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
