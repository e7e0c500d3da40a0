"""LanguageModel and LMDataModule in a stock Lightning Trainer: the numbers of train.py, also after a resume."""

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from polarlm.training.job import build_job
from polarlm.training.loop import quiet_libraries, train_run
from polarlm.training.module import LanguageModel
from tests.training.tiny_jobs import composed, fitted

OPTIONS = ("model.dropout=0.2", "trainer.max_steps=6", "data.split.test=0.03", "trainer.val_every=3")


class Rows(pl.loggers.logger.DummyLogger):
    """What Lightning logs, by step."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def parts(place, *options):
    """The module and the data of a tiny configuration, as a notebook makes them."""
    job = build_job(composed(place, *OPTIONS, *options))
    module = LanguageModel(
        job.model, optim=job.config["optim"], schedule=job.config["schedule"], seed=job.config["seed"]
    )
    return job, module, job.data


def stock(job, **options):
    quiet_libraries()
    return pl.Trainer(
        max_steps=job.steps, accumulate_grad_batches=job.plan.accumulate, accelerator="cpu", log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **{"logger": False, "enable_checkpointing": False, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of train.py: (the place of its corpus, its rows)."""
    place = tmp_path_factory.mktemp("stock")
    return place, fitted(place, place / "run", *OPTIONS)


def test_stock_lightning_gives_the_numbers_of_train_py(trained):
    place, rows = trained
    job, module, data = parts(place)
    logger = Rows()
    # Every third step is six micro-batches: Lightning's own schedule of validation.
    trainer = stock(job, logger=logger, val_check_interval=3 * job.plan.accumulate, check_val_every_n_epoch=None)
    trainer.fit(module, data)
    wanted = [row["train/loss"] for row in rows]
    assert [row["train/loss"] for row in logger.rows if "train/loss" in row] == wanted
    for name in ("train/lr", "train/grad_norm"):
        logged = [row[name] for row in logger.rows if name in row]
        assert logged == pytest.approx([row[name] for row in rows], rel=1e-6)
    validated = [row["val/loss"] for row in logger.rows if "val/loss" in row]
    assert validated == pytest.approx([row["val/loss"] for row in rows if "val/loss" in row], rel=1e-6)

    (logged,) = trainer.validate(module, data, verbose=False)
    names = [name for name in rows[-1] if name.startswith("val/")]
    assert {name: module.evaluated[name] for name in names} == {name: rows[-1][name] for name in names}
    assert logged == pytest.approx({name: rows[-1][name] for name in names}, rel=1e-6)
    (logged,) = trainer.test(module, data, verbose=False)
    names = [name for name in rows[-1] if name.startswith("test/")]
    assert names and logged == pytest.approx({name: rows[-1][name] for name in names}, rel=1e-6)
    assert {name: module.evaluated[name] for name in names} == {name: rows[-1][name] for name in names}


def test_a_stock_run_resumed_from_lightnings_own_checkpoint_goes_on_with_the_same_losses(trained, tmp_path):
    place, rows = trained
    job, module, data = parts(place)
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    stock(job, enable_checkpointing=True, callbacks=[saving], limit_val_batches=0).fit(module, data)
    job, module, data = parts(place)
    logger = Rows()
    stock(job, logger=logger, limit_val_batches=0).fit(module, data, ckpt_path=tmp_path / "step=4.ckpt")
    assert [row["train/loss"] for row in logger.rows] == [row["train/loss"] for row in rows[4:]]


def test_loaders_without_a_known_text_give_the_metrics_that_need_none(trained):
    place, _ = trained
    job, module, data = parts(place)
    batches = list(data.eval_dataloader("val", whole=True))
    (logged,) = stock(job).validate(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
    (whole,) = stock(job).validate(module, data, verbose=False)
    assert logged["val/loss"] == whole["val/loss"] and "val/bits_per_byte" in whole
    assert "val/bits_per_byte" not in logged


def test_a_trainer_without_an_end_is_refused(trained):
    place, _ = trained
    _, module, data = parts(place)
    with pytest.raises(ValueError, match=r"Trainer\(max_steps=…\) must be given"):
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1).fit(module, data)


def test_callbacks_of_lightning_see_validation_and_its_metrics(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer, module):
            seen.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))

    rows = fitted(tmp_path, tmp_path / "run", *OPTIONS, extra=(Watch(),))
    assert [step for step, _ in seen] == [3, 6]
    assert [loss for _, loss in seen] == pytest.approx([row["val/loss"] for row in rows if "val/loss" in row], rel=1e-6)


def test_evaluation_after_training_leaves_nothing_of_the_last_step_out(tmp_path):
    train_run(composed(tmp_path, *OPTIONS, "name=whole"))
    summary = json.loads((tmp_path / "runs" / "whole" / "summary.json").read_text())
    assert {"val/loss", "test/loss", "test/bits_per_byte"} <= summary.keys()
