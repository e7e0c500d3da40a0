"""CI sees the GPU path: every block trains, validates, decodes and compiles on a GPU that is only claimed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polarlm.fast import triton_backend
from tests.conftest import ROOT
from tests.gpu import claimed

MAIN = "standard_strong xsa_forgetting polar polar_paper"
pytestmark = [
    pytest.mark.skipif(claimed.compiler() is None, reason="the claimed GPU's guard needs a C++ compiler"),
    pytest.mark.skipif(not triton_backend.INSTALLED, reason="triton is not installed"),
]


def run_on_claimed_gpu(**environment: str) -> None:
    file = Path(__file__).with_name("on_claimed_gpu.py")
    first = f"import ctypes, sys; ctypes.CDLL({str(claimed.build_guard())!r}, mode=ctypes.RTLD_GLOBAL)"
    done = subprocess.run(
        [sys.executable, "-c", f"{first}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"]
        + ["-q", "-x", "-n", "0", "--tb=short", "--show-capture=no", str(file)],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_main_blocks_on_a_claimed_gpu():
    run_on_claimed_gpu(BLOCKS=MAIN, COMPILED="polar")


@pytest.mark.slow
@pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="six minutes: POLARLM_NIGHTLY=1")
def test_every_block_on_a_claimed_gpu():
    run_on_claimed_gpu()
