"""A killed run continues by itself and ends with the same bits."""

import os
import signal
import time

import pytest

from tests.end_to_end.conftest import numbers

pytestmark = pytest.mark.slow


def kill_when(shell, process, reached, sig=signal.SIGKILL) -> None:
    """Send the signal as soon as `reached()` holds."""
    deadline = time.time() + 500
    while not reached():
        assert process.is_alive(), process.log.read_text()
        assert time.time() < deadline, process.log.read_text()
        time.sleep(0.005)
    os.kill(process.pid, sig)
    process.join()


def test_killed_at_three_moments_and_restarted_it_ends_with_the_same_bits(workshop):
    folder = workshop.folder / "runs" / "killed"
    metrics, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.ckpt"

    def rows() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    moments = [
        lambda: rows() >= 2,  # before the first checkpoint
        lambda: last.exists() and rows() >= 4,  # between two checkpoints
        lambda: (folder / "checkpoints" / ".last.ckpt.tmp").exists() or rows() >= 6,  # while one is being written
    ]
    for moment in moments:
        process = workshop.start("train.py", *workshop.tiny(), "name=killed")
        kill_when(workshop, process, moment)
        assert workshop.summary("killed")["status"] != "finished"
    done = workshop.train("name=killed")
    assert done.code == 0, done.out
    assert workshop.weights("killed") == workshop.weights("done")
    assert numbers(workshop.rows("killed")) == numbers(workshop.rows("done"))


def test_sigterm_saves_reports_143_and_the_run_can_be_continued(workshop):
    folder = workshop.folder / "runs" / "terminated"
    process = workshop.start("train.py", *workshop.tiny(), "name=terminated")
    kill_when(workshop, process, lambda: (folder / "metrics.jsonl").exists(), signal.SIGTERM)
    assert process.exitcode == 143, process.log.read_text()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert workshop.train("name=terminated").code == 0
    assert workshop.weights("terminated") == workshop.weights("done")
