"""Sweeps whose jobs run elsewhere: submitit's processes with our cluster settings, joblib's workers, process groups."""

import importlib.util
import subprocess
import sys

import pytest
import yaml

from polarlm.locations import CONFIGS
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def finished(shell) -> list[dict]:
    folders = [p for p in (shell.folder / "runs").glob("*-seed*") if p.is_dir()]
    return [summary for p in folders if (summary := shell.summary(p.name))["status"] == "finished"]


@pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason='needs pip install "polarlm[cluster]"')
def test_the_slurm_settings_run_with_submitits_local_executor(shell):
    settings = yaml.safe_load((CONFIGS / "hydra" / "launcher" / "slurm.yaml").read_text())
    only_slurm = ("defaults", "partition", "max_num_timeout", "signal_delay_s", "additional_parameters")
    here = {key: value for key, value in settings.items() if key not in only_slurm}
    here |= {"defaults": ["submitit_local", "_self_"], "gpus_per_node": 0}
    place = shell.folder / "configs" / "hydra" / "launcher" / "here.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(yaml.safe_dump(here))
    done = shell.train("-m", "seed=1,2,3", "group=cluster", "hydra/launcher=here", "trainer.max_steps=4")
    assert done.code == 0, done.out
    assert [summary["group"] for summary in finished(shell)] == ["cluster"] * 3
    assert "cluster: 3 finished" in done.out  # the table comes from the run folders: the jobs ran elsewhere
    logs = list((shell.folder / "runs" / ".sweeps" / ".submitit").rglob("*.out"))
    assert len(logs) == 3 and all("run folder" in log.read_text() for log in logs)


@pytest.mark.skipif(not importlib.util.find_spec("joblib"), reason='needs pip install "polarlm[cluster]"')
def test_joblibs_workers_run_the_jobs(shell):
    # Not by the shell, whose processes wait at their end for all children: joblib's workers idle for five minutes.
    typed = ["-m", "seed=1,2", "group=workers", "hydra/launcher=joblib", "trainer.max_steps=4"]
    command = [sys.executable, str(ROOT / "train.py"), *shell.tiny(), *typed]
    done = subprocess.run(command, cwd=shell.folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(finished(shell)) == 2 and "workers: 2 finished" in done.stdout + done.stderr


def test_three_jobs_of_two_processes_each(shell):
    arguments = [
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.max_steps=4",
        "diagnostics=off",
    ]
    done = shell.train("-m", "seed=1,2,3", "group=pairs", *arguments)
    assert done.code == 0, done.out
    assert sorted(summary["seed"] for summary in finished(shell)) == [1, 2, 3]
    assert "3 finished, 0 failed" in done.out
