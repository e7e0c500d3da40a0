"""One run from its checks to its end: what is refused before training, and how a late failure is told."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from polarlm.errors import UserError
from polarlm.fast.backends import BackendChoice
from polarlm.runs.checkpoints import step_file
from polarlm.training import callbacks
from polarlm.training.loop import train_run
from tests.training.loggers.offline_wandb import read_offline_run
from tests.training.tiny_jobs import composed, fitted


def test_a_prompt_outside_the_alphabet_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="λ"):
        train_run(composed(tmp_path, "tokenizer=char", "sample.prompt='λ'"))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_after_training_is_closed_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def draw(folder):
        raise RuntimeError(f"no picture of {folder.name}")

    with pytest.raises(RuntimeError, match="no picture"):
        train_run(composed(tmp_path, "logger=wandb", "name=undrawn"), pictures=draw)
    folder = tmp_path / "runs" / "undrawn"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()][-1] == 3
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: no picture of undrawn")
    (path,) = (folder / "wandb").glob("offline-run-*")
    record = read_offline_run(path)
    assert (record.exit_code, record.summary["status"]) == (1, "failed")
    assert record.summary["error"] == summary["error"]


def test_a_run_continued_from_an_earlier_checkpoint_draws_the_same_dropout_and_repeats_no_row(tmp_path):
    """tests/end_to_end/test_resume.py kills real processes; here later checkpoints are taken away."""
    job = ("trainer.max_steps=4", "trainer.checkpoint_every=2", "model.dropout=0.5")
    whole = fitted(tmp_path, tmp_path / "run", *job)
    folder = tmp_path / "run" / "checkpoints"
    for path in set(folder.iterdir()) - {step_file(folder, 2)}:
        path.unlink()
    assert step_file(folder, 2).exists()
    again = fitted(tmp_path, tmp_path / "run", *job)
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in whole]


def test_the_attention_backend_is_in_the_folder_and_the_loggers_and_said_aloud_on_a_gpu(tmp_path, monkeypatch, capsys):
    slow = BackendChoice("streaming", "cuda", ("triton: it differs",))
    monkeypatch.setattr(callbacks, "choices", lambda: [slow])
    (tmp_path / "environment.json").write_text('{"chosen": {"precision": "bf16-mixed"}}')
    wandb: dict[str, Any] = {}
    config = SimpleNamespace(update=lambda values, allow_val_change: wandb.update(values))
    loggers = [SimpleNamespace(experiment=SimpleNamespace(config=config)), SimpleNamespace()]
    record = callbacks.RecordBackend(tmp_path)
    for batch in range(2):
        record.on_train_batch_end(SimpleNamespace(loggers=loggers), None, None, None, batch)
    said = "streaming (triton: it differs)"
    chosen = json.loads((tmp_path / "environment.json").read_text())["chosen"]
    assert chosen == {"precision": "bf16-mixed", "attention": [said]} and wandb == {"attention": [said]}
    assert capsys.readouterr().err == f"  attention: {said}\n"


def test_the_probe_before_the_first_step_is_no_training_time(tmp_path, monkeypatch):
    probe = callbacks.run_probe
    monkeypatch.setattr(callbacks, "run_probe", lambda *args: (time.sleep(0.3), probe(*args))[1])
    options = ("diagnostics.every=10", "diagnostics.tokens=16", "diagnostics.length=16")
    (row,) = fitted(tmp_path, tmp_path / "run", "diagnostics=default", *options, "trainer.max_steps=1")
    assert 0 < row["training_seconds"] <= row["seconds"] - 0.6
