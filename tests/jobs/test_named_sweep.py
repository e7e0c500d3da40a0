"""A named sweep (sweep=…) with jobs in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_jobs_of_a_named_sweep_are_single_runs_and_leave_its_plan_alone(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the moon.\n" * 400)
    runs = tmp_path / "runs"
    command = [sys.executable, str(ROOT / "train.py"), "sweep=demo", "hydra/launcher=local", "hydra.launcher.jobs=2"]
    command += [
        "hydra.launcher.threads=1",
        "logger=none",
        "block=standard",
        "seed=1,2",
        "data=text",
        f"runs_dir={runs}",
    ]
    command += [f"data.path={text}", f"cache_dir={tmp_path / 'cache'}", "trainer.max_steps=2", "trainer.val_every=2"]
    command += ["model.n_layer=1", "model.d_model=32", "data.eval_tokens=256", "diagnostics.every=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    plan = json.loads((runs / ".sweeps" / "demo" / "plan.json").read_text())
    assert len(plan["jobs"]) == 2
    logs = sorted(runs.glob(".sweeps/**/logs/*.log"))
    assert len(logs) == 2 and not any("Sweep demo" in log.read_text() for log in logs)
