"""`polarlm accept`: what it refuses, that a broken stage does not end it, and what it stores."""

import json
import sys

import pytest

from polarlm import cli
from polarlm.launch import accept as acceptance
from polarlm.launch.accept import LOSSES, STAGES, Bench, all_blocks, judge_stages, page

GPU = Bench("cuda", fake=False)


def stages(**changes):
    """What a good card answers, with changes to the first row of a stage."""
    good = {
        "environment": {"environment": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "doctor": []},
        "numerics": {"rows": [{"backend": "triton", "variant": "GQA", "dtype": "bfloat16", "head": 64, "error": 1e-2,
                               "allowed": 3e-2, "repeatable": True}]},
        "blocks": {"rows": [{"block": "polar", "compiled": True, "losses": [5.5, 5.2], "difference": 1e-4,
                             "graph_breaks": 0, "backend": ["triton"]}]},
        "kernels": {"rows": [{"context": 4096, "ratio": 2.0}]},
        "training": {"rows": [
            {"size": "124M", "block": "standard_strong", "tokens_per_second": 5e5, "mfu": 0.41, "peak_bytes": 10,
             "planned_bytes": 10},
            {"size": "124M", "block": "polar", "tokens_per_second": 4e5, "mfu": 0.33, "peak_bytes": 10,
             "planned_bytes": 10},
        ]},
        "syncs": {"rows": [{"block": "polar", "optim": "muon", "sync": None}]},
        "devices": {"rows": [{"strategy": "ddp", "killed": True, "step": 40, "val/loss": 2.0}]},
    }  # fmt: skip
    for name, change in changes.items():
        good[name]["rows"][0] |= change
    return good


def failed(verdict):
    return [check["what"] for check in verdict if check["state"] == "FAILED"]


def test_a_good_card_is_accepted():
    assert failed(judge_stages(stages(), GPU)) == []


@pytest.mark.parametrize(
    ("stage", "change", "what"),
    [
        ("numerics", {"error": 0.2}, "numerics"),
        ("numerics", {"error": float("nan")}, "numerics"),
        ("blocks", {"difference": 0.1}, "polar compiled"),
        ("blocks", {"difference": None}, "polar compiled"),
        ("blocks", {"graph_breaks": 2}, "polar compiled"),
        ("blocks", {"backend": ["streaming"]}, "polar compiled"),
        ("blocks", {"error": "OutOfMemoryError"}, "polar compiled"),
        ("kernels", {"ratio": 9.0}, "kernel speed"),
        ("training", {"mfu": 0.1}, "MFU"),
        ("training", {"tokens_per_second": 9e5}, "polar step"),
        ("training", {"peak_bytes": 20}, "memory"),
        ("syncs", {"sync": "called a synchronizing CUDA operation"}, "syncs"),
        ("devices", {"step": 12}, "two processes, ddp"),
    ],
)
def test_each_threshold_refuses(stage, change, what):
    assert failed(judge_stages(stages(**{stage: change}), GPU)) == [what]


def test_an_unknown_card_has_no_mfu_and_is_not_refused_for_it():
    verdict = judge_stages(stages(training={"mfu": None}), GPU)
    assert failed(verdict) == [] and {"state": "n/a", "what": "MFU", "answer": "n/a: unknown card"} in verdict


def test_a_stage_that_breaks_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    """Every stage's process fails at once here; all of them are in the report, and the exit code says so."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    out = tmp_path / "report.json"
    assert cli.main(["accept", "--fake", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert list(report["stages"]) == list(STAGES)
    assert all("exit code 1" in stage["error"] for stage in report["stages"].values())
    assert out.with_suffix(".md").read_text() == page(report) == capsys.readouterr().out.removesuffix("\n")


def test_a_stage_that_hangs_is_given_up(monkeypatch, tmp_path):
    script = tmp_path / "hangs"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setitem(STAGES, "syncs", acceptance.Stage(acceptance.syncs_stage, 1))
    options = cli.parser().parse_args(["accept", "--fake"])
    assert "not ready after 1 s" in acceptance.run_stage("syncs", options)["error"]


def test_the_report_has_a_place_to_go_before_anything_runs(capsys):
    assert cli.main(["accept", "--out", "/nowhere/report.json"]) == 2
    assert "must be a .json file in a folder that exists" in capsys.readouterr().err


def test_a_loss_is_stored_for_every_block_and_is_the_one_it_has_here():
    stored = json.loads(LOSSES.read_text())
    assert sorted(stored) == all_blocks()
    losses, facts = acceptance.block_losses("polar", "cpu")
    assert losses == pytest.approx(stored["polar"], abs=acceptance.LOSS_TOLERANCE)
    assert facts["backend"] and facts["graph_breaks"] == 0 and facts["compile_seconds"] == 0


def test_seconds_of_compiling_are_those_of_one_block():
    """The clock is torch's, and is set back before every block: differences across blocks were negative."""
    both = [acceptance.block_losses("standard", "cpu", compiled=compiled)[1]["compile_seconds"] for compiled in (1, 0)]
    assert both[0] > 0 == both[1]
