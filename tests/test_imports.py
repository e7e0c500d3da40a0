"""Import discipline: light at the top, and a module only looks left."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("lightning", "datasets", "wandb", "transformers", "matplotlib", "plotly", "hydra")


def test_the_library_imports_torch_only():
    code = (
        "import sys, polarlm, polarlm.geometry, polarlm.attention, polarlm.model, polarlm.data\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_module_only_looks_left():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
