"""A job builds its parts when they are asked for, and all of them before a run folder is touched."""

from __future__ import annotations

import pytest

from polarlm.errors import UserError
from polarlm.training.job import build_job
from polarlm.training.loop import train_run
from tests.training.tiny_jobs import composed


def test_the_first_batch_needs_neither_model_nor_optimiser(tmp_path):
    job = build_job(composed(tmp_path))
    assert next(iter(job.data.train_dataloader()))["tokens"].shape == (4, 16)
    assert {"corpus", "data"} <= vars(job).keys() and not {"model", "schedule", "accelerator"} & vars(job).keys()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim", {"_target_": "torch.optim.Unknown"}, "optim._target_"),
        ("schedule", {"_target_": "polarlm.training.schedules.Nothing"}, "schedule._target_"),
        ("model", {"d_model": 15}, "d_model"),
        ("trainer", {"batch_tokens": 100}, "trainer.batch_tokens"),
        ("logger", {"mine": {"_target_": "os.system"}}, "logger._target_"),
    ],
)
def test_what_is_wrong_is_said_before_a_run_folder_is_made(tmp_path, key, value, said):
    config = composed(tmp_path)
    config[key] = {**config[key], **value} if key in ("model", "trainer") else value
    with pytest.raises(UserError, match=said):
        train_run(config)
    assert not (tmp_path / "runs").exists()
