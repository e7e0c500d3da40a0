"""Programs start without the libraries that Lightning's metrics package would bring along."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import sys
from polarlm.quick_start import skip_unused_libraries
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
    code = "import sys, polarlm, polarlm.model\nassert not [f for f in sys.meta_path if 'quick_start' in str(f)]\n"
    code += "from polarlm.cli import main\nmain(['data'])\nassert [f for f in sys.meta_path if 'quick_start' in str(f)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
