"""A sweep that was killed, with a job that can't work, started again once."""

import json
import os
import signal
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # a hang, not a busy machine
RATES = [*(f"{n}e-3" for n in range(1, 6)), "-1"]  # six jobs, the last of which is wrong


def finished(folder) -> dict[str, bytes]:
    """name → metrics of every finished run."""
    runs = {}
    for file in folder.glob("*/summary.json"):
        if json.loads(file.read_text()).get("status") == "finished":
            runs[file.parent.name] = (file.parent / "metrics.jsonl").read_bytes()
    return runs


def test_five_results_one_clear_failure_and_nothing_trained_twice(shell):
    runs = shell.folder / "runs"
    command = ["train.py", *shell.tiny(), "-m", f"optim.lr={','.join(RATES)}", "group=six"]
    sweep = shell.start(*command)
    while sweep.is_alive() and len(list(runs.glob("*/checkpoints/last.ckpt"))) < 2:
        time.sleep(0.01)
    os.kill(sweep.pid, signal.SIGKILL)
    assert shell.wait(sweep, timeout=1500).code == -9
    before = finished(runs)
    assert 1 <= len(before) < 5

    done = shell.wait(shell.start(*command), timeout=1500)
    assert done.code == 2, done.out
    assert "already finished" in done.out
    assert "5 finished, 1 failed" in done.out and "Traceback" not in done.out
    assert done.out.strip().splitlines()[-1].startswith("error: 1 of 6 jobs failed")
    after = finished(runs)
    assert len(after) == 5 and not [name for name in after if name.endswith("-2")]
    assert {name: after[name] for name in before} == before  # not a row was written again
