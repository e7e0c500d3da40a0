"""A killed run continues by itself and ends with the same bits."""

import pytest

from tests.end_to_end.conftest import numbers

pytestmark = pytest.mark.slow


def test_killed_at_three_moments_and_restarted_it_ends_with_the_same_bits(workshop):
    folder = workshop.folder / "runs" / "killed"
    last = folder / "checkpoints" / "last.ckpt"
    # Before the first checkpoint, right after it, and while another is being written.
    for moment, saved in (("row 2", False), ("begun 1", True), ("checkpoint 1", True)):
        done = workshop.train("name=killed", SIGNAL_AT=f"SIGKILL {moment}")
        assert done.code == -9, done.out
        assert last.exists() == saved, moment
        assert workshop.summary("killed")["status"] != "finished"
    assert list((folder / "checkpoints").glob("*.tmp"))
    done = workshop.train("name=killed")
    assert done.code == 0, done.out
    assert workshop.weights("killed") == workshop.weights("done")
    assert numbers(workshop.rows("killed")) == numbers(workshop.rows("done"))


def test_sigterm_saves_reports_143_and_the_run_can_be_continued(workshop):
    folder = workshop.folder / "runs" / "terminated"
    done = workshop.train("name=terminated", SIGNAL_AT="SIGTERM row 1")
    assert done.code == 143, done.out
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert workshop.train("name=terminated").code == 0
    assert workshop.weights("terminated") == workshop.weights("done")
