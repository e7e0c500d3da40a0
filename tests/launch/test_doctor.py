"""`polarlm doctor`: one row per check, a broken backend is found, and the exit code follows."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

import pytest
import torch

from polarlm.fast import backends as kernels
from polarlm.launch import doctor


def test_every_backend_has_a_row_with_error_and_time_or_a_reason() -> None:
    rows = {what: (state, text) for state, what, text in doctor.backends()}
    assert set(rows) == {f"attention: {name}" for name in kernels.BACKENDS}
    for name in ("reference", "native", "streaming"):
        state, text = rows[f"attention: {name}"]
        assert state == "ok" and "ms forward and backward" in text, text
    assert rows["attention: flex"] == ("n/a", "not here: FlexAttention has no backward pass on cpu")


def test_a_wrong_backend_and_a_raising_check_fail_the_whole(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    native = kernels.BACKENDS["native"]

    def wrong(call):
        out = native.run(call)
        return replace(out, v_bar=1.1 * out.v_bar)

    def broken():
        raise OSError("no such disk")

    monkeypatch.setitem(kernels.BACKENDS, "native", native._replace(run=wrong))
    monkeypatch.setattr(doctor, "disk", broken)
    for slow in ("compiler", "precisions", "installed_versions"):
        monkeypatch.setattr(doctor, slow, lambda: iter(()))
    assert doctor.doctor(argparse.Namespace(offline=True)) == 1
    said = capsys.readouterr().out
    assert "FAILED   attention: native        it differs from the reference by" in said
    assert "FAILED   disk                     OSError: no such disk" in said
    assert said.rstrip().endswith("2 broken")


def test_the_ratio_that_auto_names_is_that_of_the_printed_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("a CPU's choice")
    rows = {what: text for _, what, text in doctor.precisions()}
    fp32, bf16 = (float(rows[name].split()[0].replace(",", "")) for name in ("float32", "bfloat16"))
    said = float(re.search(r"are ([\d.e+-]+) times as fast", rows["trainer.precision=auto"]).group(1))
    assert said == pytest.approx(bf16 / fp32, rel=0.06)
