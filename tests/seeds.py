"""Seeds of the tests that draw what they try: other ones with every commit, the same ones for one commit.

So a suite that passed passes again, what failed fails again, and the project still tries something new every day; the
nightly set (POLARLM_NIGHTLY=1) draws anew each time. A variable (POLARLM_FAULT_SEED=732507) repeats a printed one.
"""

import os
import random
import subprocess
from pathlib import Path


def drawn_seed(variable: str) -> int:
    """The variable's number, or this commit's; printed, because pytest shows it with a failure."""
    if variable in os.environ:
        seed = int(os.environ[variable])
    elif "POLARLM_NIGHTLY" in os.environ:
        seed = random.SystemRandom().randrange(10**6)
    else:
        seed = int(_commit(), 16) % 10**6
    print(f"{variable}={seed}")
    return seed


def _commit() -> str:
    """HEAD of the repository with these tests, 0 where they lie in none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "0"
