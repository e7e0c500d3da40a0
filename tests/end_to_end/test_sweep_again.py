"""A sweep that was killed, with a job that can't work, started again once."""

import json

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
    done = shell.wait(shell.start(*command, SIGNAL_AT="SIGKILL begun 4"), timeout=1500)
    assert done.code == -9, done.out
    before = finished(runs)
    assert len(before) == 3

    done = shell.wait(shell.start(*command), timeout=1500)
    assert done.code == 2
    assert f"{len(before)} already finished, 1 to continue" in done.out
    assert "11 finished, 1 failed" in done.out and "Traceback" not in done.out
    assert done.out.strip().splitlines()[-1].startswith("error: 1 of 12 jobs failed")
    after = finished(runs)
    assert len(after) == 11 and not [name for name in after if name.endswith("-2")]
    assert {name: after[name] for name in before} == before  # not a row was written again
    assert done.out.count("Already finished") == len(before)
