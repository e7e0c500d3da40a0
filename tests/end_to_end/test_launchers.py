"""Sweeps whose jobs run elsewhere: submitit's processes with our cluster settings, process groups."""

import importlib.util
import json
import shlex

import pytest
import yaml

from study.summaries import read_summary

pytestmark = pytest.mark.slow


def finished(shell) -> list[dict]:
    folders = [p for p in (shell.folder / "runs").glob("*-seed*") if p.is_dir()]
    return [summary for p in folders if (summary := shell.summary(p.name))["status"] == "finished"]


@pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason='needs pip install "polarlm[cluster]"')
def test_the_slurm_launcher_runs_with_submitits_local_executor(shell):
    slurm = ["hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.gpus_per_node=0"]
    done = shell.train("-m", "seed=1,2", "group=cluster", "trainer.max_steps=4", *slurm)
    assert done.code == 0, done.out
    assert [summary["group"] for summary in finished(shell)] == ["cluster"] * 2
    assert "Sweep: 2 finished, 0 failed" in done.out
    logs = list((shell.folder / "runs" / ".sweeps" / "cluster" / "logs").glob("*.log"))
    assert len(logs) == 2 and all("run folder" in log.read_text() for log in logs)
    # The printed command compares these runs.
    command = next(line for line in done.out.splitlines() if "Compare them: " in line).partition("polarlm ")[2]
    compared = shell.run("polarlm/__main__.py", *shlex.split(command), "--text")
    assert compared.code == 0 and "standard" in compared.out, compared.out


@pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason='needs pip install "polarlm[cluster]"')
def test_a_study_runs_on_a_cluster_and_the_same_command_comes_back_to_its_jobs(shell):
    """Three jobs through submitit's local executor: submitted and left, then waited for, then only counted."""
    plan = {
        "number": 1, "title": "One block", "question": "Does it train?", "rule": "three seeds",
        "parts": {"only": {"title": "only", "variants": {"standard": ["block=standard"]}, "baseline": "standard"}},
        "settings": [*shell.tiny(), "trainer.max_steps=4"], "seeds": [1, 2, 3], "metric": "val/loss", "margin": 0.01,
    }  # fmt: skip
    place = shell.folder / "configs" / "study" / "three.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(yaml.safe_dump(plan))
    command = ["study", "three", "--runs", "runs", "--summaries", "rows", "--on", "slurm", "cluster=local"]
    left = shell.run("polarlm/__main__.py", *command, "gpus_per_node=0", "wait=false")
    assert left.code == 0 and "same command reconnects" in left.out, left.out
    queued = json.loads((shell.folder / "runs" / ".study" / "submitted.json").read_text())
    assert len(queued) == 3
    done = shell.run("polarlm/__main__.py", *command, "gpus_per_node=0")
    assert done.code == 0 and "The plan is carried out" in done.out, done.out
    assert json.loads((shell.folder / "runs" / ".study" / "submitted.json").read_text()) == queued  # not twice
    assert sorted(summary["seed"] for summary in finished(shell)) == [1, 2, 3]
    rows = read_summary(shell.folder / "rows", "three").rows
    assert len(rows) == 3


def test_two_jobs_of_two_processes_each(shell):
    arguments = [
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_steps=4",
        "diagnostics=off",
    ]
    done = shell.train("-m", "seed=1,2", "group=pairs", *arguments)
    assert done.code == 0, done.out
    assert sorted(summary["seed"] for summary in finished(shell)) == [1, 2]
    assert "2 finished, 0 failed" in done.out
