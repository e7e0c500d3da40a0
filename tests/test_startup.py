"""Before anything heavy is imported: libraries that nothing needs, instructions that a processor cannot carry out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polarlm import startup

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
    monkeypatch.setattr(startup, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(os, "environ", {"ONEDNN_MAX_CPU_ISA": given} if given else {})
    startup.avoid_broken_tiles()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


def test_a_machine_without_cpuinfo_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "CPUINFO", tmp_path / "nothing")
    monkeypatch.setattr(os, "environ", {})
    startup.avoid_broken_tiles()
    assert os.environ == {}


ROOT = Path(__file__).resolve().parents[1]
CODE = """
import sys
from polarlm.startup import skip_unused_libraries
skip_unused_libraries()
skip_unused_libraries()
finders = len(sys.meta_path)
import lightning.pytorch, torchmetrics
assert not {"scipy", "transformers", "matplotlib"} & set(sys.modules), "imported"
assert len(sys.meta_path) == finders - 1, "the finder stays"
from lightning_utilities.core.imports import RequirementCache, package_available
assert RequirementCache("scipy") and package_available("transformers"), "others are told so too"
assert torchmetrics.MeanMetric()([1.0, 3.0]) == 2.0
import scipy.stats
"""


def test_torchmetrics_alone_believes_that_they_are_absent():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_our_programs_ask_for_it_and_the_library_does_not():
    code = "import sys, polarlm, polarlm.model\nassert not [f for f in sys.meta_path if 'polarlm.startup' in str(f)]\n"
    code += (
        "from polarlm.cli import main\nmain(['data'])\nassert [f for f in sys.meta_path if 'polarlm.startup' in str(f)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
