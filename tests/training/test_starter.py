"""A rank that Lightning started ends with the process that started it."""

import os
import signal
import subprocess
import sys

import pytest

RANK = """
import os, time
from polarlm.training.ranks import end_with_starter
end_with_starter()
print(os.getpid(), flush=True)
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys, time
os.environ["POLARLM_RANK_0"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_killing_rank_0_ends_the_ranks_it_started():
    starter = subprocess.Popen([sys.executable, "-c", STARTER, RANK], stdout=subprocess.PIPE, text=True)
    assert starter.stdout.readline()  # the rank is watching
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert starter.stdout.readline() == ""  # the rank, which held the other end of the pipe, is gone
