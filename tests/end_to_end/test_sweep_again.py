"""A sweep that was killed, with a job that can't work, started again once."""

import json
import os
import signal
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # a hang, not a busy machine
RATES = [*(f"{n}e-3" for n in range(1, 12)), "-1"]  # twelve jobs, the last of which is wrong


def finished(folder) -> dict[str, bytes]:
    """name → metrics of every finished run."""
    runs = {}
    for file in folder.glob("*/summary.json"):
        if json.loads(file.read_text()).get("status") == "finished":
            runs[file.parent.name] = (file.parent / "metrics.jsonl").read_bytes()
    return runs


def test_eleven_results_one_clear_failure_and_nothing_trained_twice(shell):
    runs = shell.folder / "runs"
    command = ["train.py", *shell.tiny(), "-m", f"optim.lr={','.join(RATES)}", "group=twelve"]
    process = shell.start(*command)
    deadline = time.time() + 1000
    while len(finished(runs)) < 3 or len({file.parts[-3] for file in runs.glob("*/checkpoints/last.ckpt")}) < 4:
        assert process.is_alive() and time.time() < deadline, process.log.read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = finished(runs)
    assert 3 <= len(before) < 11

    done = shell.wait(shell.start(*command), timeout=1500)
    assert done.code == 2
    assert f"{len(before)} already finished, 1 to continue" in done.out
    assert "11 finished, 1 failed" in done.out and "Traceback" not in done.out
    assert done.out.strip().splitlines()[-1].startswith("error: 1 of 12 jobs failed")
    after = finished(runs)
    assert len(after) == 11 and not [name for name in after if name.endswith("-2")]
    assert {name: after[name] for name in before} == before  # not a row was written again
    assert done.out.count("Already finished") == len(before)
