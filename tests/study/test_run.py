"""Carrying out a plan: what is there is counted, nothing is trained twice, runs are known by their settings."""

import json

import pytest
import yaml

from polarlm.block_keys import flat_block
from polarlm.runs.identity import identity_of
from polarlm.runs.measurements import write_evaluation
from study.collect import collect
from study.jobs import Planner
from study.run import Study
from study.summaries import Summary, read_summary
from tests.study.made_up import question


@pytest.fixture(scope="module")
def planner():
    return Planner()


def write_run(folder, config, status="finished", loss=1.5):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    numbers = {"status": status, "val/loss": loss, "val/bits_per_byte": 2 * loss, "seed": config["seed"]}
    (folder / "summary.json").write_text(json.dumps(numbers))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 10, "seconds": 1, "val/bits_per_byte": 3}))
    return folder


def test_finished_runs_are_counted_and_become_rows(tmp_path, planner):
    asked = question()
    jobs = planner.ready(asked, lambda identity: None)
    write_run(tmp_path / "runs" / "by-hand", jobs[0].config)
    write_run(tmp_path / "runs" / "killed", jobs[1].config, "running")
    twice = [asked, question()]  # two questions that need the same runs
    study = Study(twice, tmp_path / "runs", tmp_path / "rows")
    waiting = study.waiting()
    assert len(jobs) == 6 and len(waiting) == 5
    assert not any("seed=1" in job.overrides and "block=standard" in job.overrides for job in waiting)
    study.note_all()
    (row,) = read_summary(tmp_path / "rows", "blocks").rows
    assert (row["variant"], row["seed"], row["val/loss"], row["curve"]["tokens"]) == ("standard", 1, 1.5, [10])
    assert row["command"] == "python train.py trainer=cpu block=standard seed=1"
    # On another machine the row stands for the run, if that is wished.
    elsewhere = Study([asked], tmp_path / "none", tmp_path / "rows", reuse=True)
    assert len(elsewhere.waiting()) == 5
    assert len(Study([asked], tmp_path / "none", tmp_path / "rows").waiting()) == 6


def test_only_the_evaluations_that_were_asked_for_count_and_are_kept(tmp_path, planner):
    asked = question(evaluate=["protocol=length,corruption", "tokens=1000"])
    jobs = planner.ready(asked, lambda identity: None)
    folders = [write_run(tmp_path / "runs" / str(n), job.config) for n, job in enumerate(jobs)]

    def evaluate(folder, name, tokens):
        protocol = {"name": name, "data": "shakespeare", "split": "val", "tokens": tokens}
        write_evaluation(folder, {"protocol": protocol, "by_corruption": []})

    for name in ("length", "corruption"):
        evaluate(folders[0], name, 999)  # 1,000 tokens have 999 targets
        evaluate(folders[1], name, 499)  # on other text
    evaluate(folders[0], "length", 499)
    evaluate(folders[0], "calibration", 999)
    evaluate(folders[2], "length", 999)
    study = Study([asked], tmp_path / "runs", tmp_path / "rows")
    waiting = study.waiting()
    assert {job.verb for job in waiting} == {"eval"} and len(waiting) == len(jobs) - 1
    assert all(job.overrides[1:] == ("protocol=length,corruption", "tokens=1000") for job in waiting)
    study.note_all()
    kept = {
        (row["variant"], row["seed"]): [(e["protocol"]["name"], e["protocol"]["tokens"]) for e in row["evaluations"]]
        for row in read_summary(tmp_path / "rows", "blocks").rows
    }
    assert kept[jobs[0].variant, jobs[0].seed] == [("corruption", 999), ("length", 999)]
    assert kept[jobs[1].variant, jobs[1].seed] == [] and kept[jobs[2].variant, jobs[2].seed] == [("length", 999)]


def test_runs_made_by_hand_are_collected_by_their_settings(tmp_path, planner):
    asked = question(tune={"values": [1e-3, 2e-3], "extend": 0, "settings": ["trainer.max_steps=50"]})
    search = planner.job(asked, "letters", "polar", "tune", 1e-3, 1000)
    seed = planner.job(asked, "letters", "polar", "seeds", 5e-3, 2)  # a rate that is not in the list
    older = {**seed.config, "seed": 3, "block": flat_block(seed.config["block"])}
    del older["block"]["irls_steps"]
    foreign = {**seed.config, "model": {**seed.config["model"], "n_layer": 9}}
    folders = [
        write_run(tmp_path / name, config)
        for name, config in (("a", search.config), ("b", seed.config), ("c", older), ("d", foreign))
    ]
    folders.append(write_run(tmp_path / "e", {**seed.config, "seed": 1}, "running"))
    summary = Summary("blocks")
    collected = collect(asked, folders, summary, planner)
    assert [(r["stage"], r["value"], r["seed"]) for r in summary.rows] == [
        ("tune", 1e-3, 1000), ("seeds", 5e-3, 2), ("seeds", 5e-3, 3),
    ]  # fmt: skip
    assert collected.younger == {"block.irls_steps"} and collected.new == 3
    assert [f.name for f in collected.unplanned] == ["d"] and [f.name for f in collected.unfinished] == ["e"]
    assert collect(asked, folders, summary, planner).renewed == 3  # again: nothing is doubled


def test_a_run_from_before_a_setting_was_added_is_what_it_was_then(tmp_path, planner):
    """A polar that knows nothing of forgetting did not forget; one without `match` was not matched."""
    asked = question(
        variants={
            "plain": ["block=polar", "block.forgetting=none"],
            "forgets": ["block=polar"],
            "matched": ["block=polar", "block.forgetting=none", "match=parameters"],
        },
        baseline="plain",
    )
    plain, forgets = (planner.job(asked, "letters", name, "seeds", None, 1) for name in ("plain", "forgets"))
    names = ("forgetting", "forget_bias")
    flat = flat_block(plain.config["block"])  # as blocks were stored then
    old = {**plain.config, "block": {k: v for k, v in flat.items() if k not in names}}
    assert identity_of(old) == identity_of(plain.config) != identity_of(forgets.config)
    biased = {**plain.config, "block": {**flat, "forget_bias": 3.0}}
    assert identity_of(biased) == identity_of(plain.config)  # a bias without gates says nothing
    summary = Summary("blocks")
    collect(asked, [write_run(tmp_path / "old", old)], summary, planner)
    assert [row["variant"] for row in summary.rows] == ["plain"]
