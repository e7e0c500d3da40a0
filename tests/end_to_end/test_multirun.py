"""Sweeps: one folder per job, failures that do not stop the rest."""

import pytest

pytestmark = pytest.mark.slow


def test_a_sweep_makes_one_finished_run_per_job_as_if_each_were_trained_alone(workshop):
    done = workshop.train("-m", "block=standard,polar", "seed=2", "group=pair", "trainer.max_steps=8")
    assert done.code == 0, done.out
    folders = [p for p in (workshop.folder / "runs").glob("*-seed*") if p.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        summary = workshop.summary(folder.name)
        assert summary["status"] == "finished" and summary["group"] == "pair"
    assert "2 finished, 0 failed" in done.out
    # A job of the sweep equals the same run on its own.
    last = next(p.name for p in folders if workshop.summary(p.name)["block"] == "polar")
    assert workshop.train("block=polar", "seed=2", "name=alone", "trainer.max_steps=8").code == 0
    assert workshop.weights("alone") == workshop.weights(last)


def test_a_failing_job_is_reported_at_the_end_and_does_not_stop_the_others(workshop):
    done = workshop.train("-m", "model.n_head=2,3", "trainer.max_steps=4", "group=broken")
    assert done.code != 0
    assert "1 finished, 1 failed" in done.out
    assert "model.n_head=3" in done.out and "Traceback" not in done.out
    summaries = [workshop.summary(p.name) for p in (workshop.folder / "runs").glob("*-seed*") if p.is_dir()]
    assert sum(s["group"] == "broken" and s["status"] == "finished" for s in summaries) == 1
