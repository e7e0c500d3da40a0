"""Processors that announce instructions they cannot carry out."""

import os

import pytest

from polarlm import processor

STANZA = "processor\t: 0\ncpuid level\t: {level}\nflags\t\t: fpu {tiles}\n\nprocessor\t: 1\ncpuid level\t: 31\n\n"


@pytest.mark.parametrize(
    ("level", "tiles", "given", "expected"),
    [
        (28, "amx_bf16 amx_tile", None, "AVX512_CORE_FP16"),  # a hypervisor that hides leaf 0x1d
        (28, "amx_bf16 amx_tile", "AVX2", "AVX2"),  # what the user has set stays
        (29, "amx_bf16 amx_tile", None, None),  # AMX works here
        (28, "", None, None),
    ],
)
def test_tiles_whose_size_is_hidden_are_not_used(tmp_path, monkeypatch, level, tiles, given, expected):
    (tmp_path / "cpuinfo").write_text(STANZA.format(level=level, tiles=tiles))
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(os, "environ", {"ONEDNN_MAX_CPU_ISA": given} if given else {})
    processor.avoid_broken_tiles()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


def test_a_machine_without_cpuinfo_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "nothing")
    monkeypatch.setattr(os, "environ", {})
    processor.avoid_broken_tiles()
    assert os.environ == {}
