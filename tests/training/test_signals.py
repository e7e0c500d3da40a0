"""The signals that end a run, and what SLURM's own mechanism of Lightning must not do."""

import os
import signal

import pytest

from polarlm.training.callbacks import GracefulStop
from polarlm.training.ranks import cluster_plugins


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_is_noted_and_becomes_the_exit_code(number, code):
    stop = GracefulStop(agree_every=1)
    stop.on_train_start(None, None)
    try:
        os.kill(os.getpid(), getattr(signal, number))
        signal.sigtimedwait([], 0.01)  # the handler runs
        assert stop.exit_code == code
    finally:
        stop.teardown(None, None, "fit")
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_lightning_does_not_requeue_by_itself(monkeypatch):
    assert cluster_plugins() == []
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    [plugin] = cluster_plugins()
    assert plugin.auto_requeue is False
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun inside a job
    monkeypatch.setenv("MASTER_PORT", "1")
    assert cluster_plugins() == []
