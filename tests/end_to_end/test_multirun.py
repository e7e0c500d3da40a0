"""Sweeps: one folder per job, failures that do not stop the rest."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_named_sweep_makes_one_finished_run_per_job_as_if_each_were_trained_alone(workshop):
    settings = ["sweep=demo", "trainer.max_steps=8"]
    done = workshop.train(*settings, "block=standard,polar", "seed=2")
    assert done.code == 0 and "2 finished, 0 failed" in done.out, done.out
    runs = workshop.folder / "runs"
    folders = [p for p in runs.glob("*-seed*") if p.is_dir()]
    assert [(s["status"], s["group"]) for s in map(workshop.summary, (p.name for p in folders))] == [
        ("finished", "demo")
    ] * 2
    # Its jobs are single runs: none of them is a sweep of its own that overwrites the plan.
    assert len(json.loads((runs / ".sweeps" / "demo" / "plan.json").read_text())["jobs"]) == 2
    logs = list((runs / ".sweeps" / "demo" / "logs").glob("*.log"))
    assert len(logs) == 2 and not any("Sweep demo" in log.read_text() for log in logs)
    # A job of the sweep equals the same run on its own.
    polar = next(p.name for p in folders if workshop.summary(p.name)["block"] == "polar")
    alone = [*settings, "hydra.mode=RUN", "block=polar", "seed=2", "name=alone", "resume=never"]
    assert workshop.train(*alone).code == 0
    assert workshop.weights("alone") == workshop.weights(polar)


def test_a_failing_job_is_reported_at_the_end_and_does_not_stop_the_others(workshop):
    done = workshop.train("-m", "model.n_head=2,3", "trainer.max_steps=4", "group=broken")
    assert done.code != 0
    assert "1 finished, 1 failed" in done.out
    assert "model.n_head=3" in done.out and "Traceback" not in done.out
    summaries = [workshop.summary(p.name) for p in (workshop.folder / "runs").glob("*-seed*") if p.is_dir()]
    assert sum(s["group"] == "broken" and s["status"] == "finished" for s in summaries) == 1
