"""Run folders are read whatever state they are in: finished, running, killed, damaged."""

import json
import os
import time

import numpy as np
import pytest

from polarlm.errors import UserError
from polarlm.report.payload import bucket_edges, thin
from polarlm.runs.measurements import read_metrics
from polarlm.runs.reading import find_run_folders, read_run, read_runs
from tests.synthetic_runs import write_run, write_sweep


def test_a_finished_run_is_read_completely(tmp_path):
    run = read_run(write_run(tmp_path / "polar-seed2", "polar", 2))
    assert (run.name, run.block, run.seed, run.status, run.problems) == ("polar-seed2", "polar", 2, "finished", ())
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    stream = run.metrics.stream("train/loss")
    assert stream["train/loss"].tolist() == [row["train/loss"] for row in rows]
    assert run.number("val/loss") == rows[-1]["val/loss"]
    assert run.flops == rows[-1]["flops"]
    assert len(run.probes) == 7
    assert run.probes[-1].values["precision/log_evidence"].shape == (4, 4)


def test_half_written_last_lines_are_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "run", "polar", status=None)
    for name in ("metrics.jsonl", "diagnostics/probe.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 610, "tokens": 24')
    run = read_run(folder)
    assert run.status == "running"
    assert run.metrics.columns["step"].max() == 600
    assert [p.step for p in run.probes][-1] == 600
    assert run.number("val/bits_per_byte") is not None  # the newest value of the metrics stands in for the summary


def test_a_complete_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "tokens": 8, "seconds": 0.1}\n{"step": 2, "tokens": 16, "seconds": 0.2}')
    assert read_metrics(path).columns["step"].tolist() == [1, 2]


def test_damaged_lines_and_wrong_types_do_not_stop_the_reader(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 3.0}\n\0\0garbage\n[1]\n{"step": 2, "train/loss": "oops"}\n'
        '{"step": 3, "train/loss": NaN}\n'
        '{"step": 4, "train/loss": 2.0}\n'
    )
    metrics = read_metrics(path)
    assert metrics.unreadable == 2
    assert metrics.stream("train/loss")["step"].tolist() == [1, 4]


def test_a_silent_run_was_stopped(tmp_path):
    folder = write_run(tmp_path / "run", status="running")
    assert read_run(folder).status == "running"
    long_ago = time.time() - 3600
    for path in folder.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert read_run(folder).status == "stopped"


def test_steps_repeated_after_a_restart_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0), (3, 5.0), (4, 4.0)]
    path.write_text("".join(json.dumps({"step": s, "train/loss": loss}) + "\n" for s, loss in rows))
    stream = read_metrics(path).stream("train/loss")
    assert stream["step"].tolist() == [1, 2, 3, 4]
    assert stream["train/loss"].tolist() == [9, 6, 5, 4]


def test_empty_and_broken_files_give_an_empty_run_with_reasons(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("a: [1,\n")
    (folder / "summary.json").write_text("{")
    run = read_run(folder)
    assert len(run.metrics) == 0
    assert len(run.problems) == 2
    assert run.block == "unknown"


def test_folders_are_found_by_pattern_and_by_parent_once_and_in_natural_order(tmp_path):
    write_sweep(tmp_path / "runs", blocks=("polar",), seeds=(10, 9), diagnostics=False)
    (tmp_path / "runs" / "notes.txt").write_text("not a run")
    (tmp_path / "runs" / ".sweeps").mkdir()
    folders = find_run_folders([str(tmp_path / "runs" / "*"), str(tmp_path / "runs"), str(tmp_path)])
    assert [p.name for p in folders] == ["polar-seed9", "polar-seed10"]


def test_no_run_is_a_sentence_for_the_user(tmp_path):
    with pytest.raises(UserError, match=r"No run folder found in .*nothing.*train one with"):
        find_run_folders([str(tmp_path / "nothing*")])


def test_only_changed_folders_are_read_again(tmp_path, monkeypatch):
    folders = write_sweep(tmp_path, blocks=("standard",), seeds=(1, 2), diagnostics=False)
    cache: dict = {}
    first = read_runs(folders, cache)
    write_run(folders[1], "standard", 2, steps=700, diagnostics=False)
    second = read_runs(folders, cache)
    assert second[0] is first[0]
    assert second[1].number("tokens") == 700 * 4096


def test_thinning_keeps_means_ends_and_nans():
    step = np.arange(1.0, 10_001.0)
    loss = np.where(step > 9_000, np.nan, step)
    edges = bucket_edges(10_000, 400)
    thinned = thin({"step": step, "train/loss": loss}, edges)
    assert 250 < len(thinned["step"]) <= 402
    assert thinned["step"][0] == 1
    finite = ~np.isnan(thinned["train/loss"])
    assert thinned["train/loss"][finite] == pytest.approx(thinned["step"][finite])
    assert np.isnan(thinned["train/loss"][thinned["bucket"] > 9_000]).all()


def test_thinned_seeds_stay_aligned():
    edges = bucket_edges(1000, 100)
    long = thin({"step": np.arange(1.0, 1001.0)}, edges)["bucket"]
    short = thin({"step": np.arange(1.0, 701.0)}, edges)["bucket"]
    assert np.array_equal(long[: len(short) - 1], short[:-1])


@pytest.mark.slow
def test_two_hundred_long_runs_load_in_ten_seconds(tmp_path):
    source = write_run(tmp_path / "source", "polar", 1, 10_000, log_every=1, probe_every=500)
    files = ("config.yaml", "summary.json", "metrics.jsonl", "diagnostics/probe.jsonl")
    for index in range(200):
        (tmp_path / "runs" / f"run{index}" / "diagnostics").mkdir(parents=True)
        for file in files:
            os.link(source / file, tmp_path / "runs" / f"run{index}" / file)
    # Processor time, not the clock: other work on the machine must not decide. On two idle cores it is about twice the
    # time that a reader waits.
    start = time.process_time()
    runs = read_runs(find_run_folders([tmp_path / "runs"]))
    assert time.process_time() - start < 10
    assert len(runs) == 200
    assert all(run.metrics.columns["step"].max() == 10_000 for run in runs)
    assert all(len(run.metrics.stream("val/loss")["step"]) == 1_000 for run in runs)
