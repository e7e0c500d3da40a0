"""The table of `make frozen` covers every block, and a few of its cases are computed again here."""

import json

import pytest

from tools.frozen import ROOT, TABLE, compute, machine, report, wanted

FROZEN = json.loads(TABLE.read_text())


@pytest.mark.parametrize("block", sorted(path.stem for path in (ROOT / "configs" / "block").glob("*.yaml")))
def test_every_block_is_frozen_in_training_and_decoding(block):
    assert {f"block/{block}/fast", f"decode/{block}"} <= FROZEN["cases"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["block/standard/fast", "block/polar/fast", "block/polar/reference", "decode/polar"])
def test_training_and_decoding_are_as_frozen(case):
    numbers_now = {name: numbers for name, numbers in compute([case]) if name == case}
    assert report(FROZEN, numbers_now, [case]) == 0


def test_other_bits_and_a_lost_case_are_reported(capsys):
    case = {"loss": 2.0, "hash": "a"}
    frozen = {"machine": machine(), "cases": {"x": case, "y": case}}
    assert report(frozen, {"x": {"loss": 2.0, "hash": "b"}}, ["x", "y"]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "x: other bits (loss 2.000000 → 2.000000, +0.0e+00)",
        "y: this case is gone",
    ]


def test_on_another_machine_losses_are_compared(capsys):
    frozen = {"machine": "another", "cases": {"x": {"loss": 2.0, "hash": "a"}}}
    assert report(frozen, {"x": {"loss": 2.001, "hash": "b"}}, ["x"]) == 0
    assert report(frozen, {"x": {"loss": 2.1, "hash": "b"}}, ["x"]) == 1
    assert "Frozen on another" in capsys.readouterr().out


def test_a_beginning_selects_cases():
    assert wanted(["block/polar/fast", "block/polar_paper/fast", "run/eval"], ["block/polar/", "run"]) == [
        "block/polar/fast",
        "run/eval",
    ]
