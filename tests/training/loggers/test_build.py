"""Loggers and callbacks named by a yaml: several at once, the user's own, and one that fails never stops a run."""

import csv
import json
import lzma
import sys

import pytest
from lightning.pytorch.loggers.logger import Logger

from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.runs.checkpoints import step_file
from polarlm.runs.files import json_lines
from polarlm.training.loggers import check_targets, guard, what_varies
from polarlm.training.loop import train_run
from tests.training.tiny_jobs import composed

OWN = """
import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyExperiment, Logger


class Broken(Logger):
    name, version = "broken", 0
    experiment = property(lambda self: DummyExperiment())

    def __init__(self, place):
        super().__init__()
        self.place = place

    def log_hyperparams(self, *args): pass

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the disk\\nof " + self.place)


class Shout(pl.Callback):
    def __init__(self, every, word):
        self.every, self.word = every, word

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step % self.every == 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            print(self.word, trainer.global_step)
            for logger in trainer.loggers:
                logger.log_metrics({"shouted": 1.0}, step=trainer.global_step)


class Count(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("counted", float(trainer.global_step))
"""
YAMLS = {
    "logger/broken": 'broken:\n  _target_: own_parts.Broken\n  place: "{folder}/x"\n',
    "callbacks/shout": "shout:\n  _target_: own_parts.Shout\n  every: 2\n  word: hey\n",
    "callbacks/count": "count:\n  _target_: own_parts.Count\n",
    "callbacks/absent": "absent:\n  _target_: own_parts.Missing\n",
    "callbacks/wrong": "wrong:\n  _target_: os.system\n  command: ls\n",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module and yamls of the user's own, where the command is typed."""
    (tmp_path / "own_parts.py").write_text(OWN)
    for name, text in YAMLS.items():
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_parts", None)


def configuration(place, *typed):
    """What train.py makes of a command line typed in `place`: choices from our configs and the user's."""
    base = composed(place)
    (job,) = plan_jobs(config_loader(), "train", typed, multirun=False).jobs
    assert job.error is None, job.error
    return {**base, "logger": job.config["logger"], "callbacks": job.config["callbacks"]}


def test_a_users_logger_and_callback_are_one_yaml_each_and_a_failing_logger_does_not_stop_the_run(own, capfd):
    config = configuration(own, "logger=[csv,broken]", "callbacks=[shout,learning_rate]", "callbacks.shout.word=ho")
    train_run({**config, "name": "mine"})
    folder = own / "runs" / "mine"
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("shouted") for row in rows] == [None, 1.0, None]
    assert rows[1]["lr-AdamW/decay"] == pytest.approx(rows[1]["train/lr"])
    seen = capfd.readouterr()
    assert "ho 2" in seen.out
    assert seen.err.count("logger broken failed") == 1
    assert f"ConnectionError: the disk of {folder}/x" in seen.err and "metrics.jsonl is still written" in seen.err
    with open(folder / "csv" / "metrics.csv") as file:
        written = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    assert written == {row["step"]: row["train/loss"] for row in rows}
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_what_a_callback_gives_to_self_log_is_in_the_row_of_its_step(own):
    config = configuration(own, "logger=none", "callbacks=count")
    trainer = {**config["trainer"], "max_steps": 5, "log_every": 2}
    train_run({**config, "trainer": trainer, "name": "counted"})
    rows = json_lines(own / "runs" / "counted" / "metrics.jsonl")
    assert {row["step"]: row.get("counted") for row in rows} == {1: None, 2: 2.0, 4: 4.0, 5: None}


def test_what_cannot_be_built_is_refused_before_a_folder_is_made(own, monkeypatch):
    for name, why in (("absent", "can't be imported"), ("wrong", "is not a subclass")):
        with pytest.raises(UserError, match=why):
            train_run({**configuration(own, f"callbacks={name}"), "name": "never"})
    config = configuration(own)
    with pytest.raises(UserError, match=r"logger\._target_='os\.remove' is not a class that a yaml"):
        train_run({**config, "logger": {"x": {"_target_": "os.remove"}}, "name": "never"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("mlflow", "tensorboard", "trackio"):
        with pytest.raises(UserError, match=rf"logger={name} needs the {name} package.*polarlm\[{name}\]"):
            check_targets(configuration(own, f"logger={name}"))
    assert not (own / "runs").exists()


def test_a_resumed_run_has_one_gapless_curve_in_csv_and_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    options = ("logger=[csv,tensorboard]", "trainer.checkpoint_every=2", "trainer.max_steps=5", "name=again")
    train_run(composed(tmp_path, *options))
    folder = tmp_path / "runs" / "again"
    for path in set((folder / "checkpoints").iterdir()) - {step_file(folder / "checkpoints", 2)}:
        path.unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    train_run(composed(tmp_path, *options))
    with open(folder / "csv" / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == ["1", "2", "3", "4", "5"]
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_lightnings_early_stopping_ends_the_run_with_whole_splits_and_a_summary(tmp_path, capsys):
    options = ("callbacks=[early_stopping,model_summary]", "callbacks.early_stopping.patience=1", "trainer.val_every=2")
    still = ("optim.lr=1e-12", "trainer.max_steps=20", "name=stopped", "data.split.test=0.03")
    train_run(composed(tmp_path, *options, *still))
    summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["step"] < 20
    assert {"val/loss", "test/loss"} <= summary.keys()
    assert "model.blocks" in capsys.readouterr().out


def test_the_first_error_of_a_logger_is_told_and_it_is_left_alone_from_then_on(capsys):
    calls = []

    class Fails(Logger):
        name, version, experiment = "x", 0, None

        def log_hyperparams(self, *args): ...

        def log_metrics(self, metrics, step=None):
            calls.append(step)
            raise ValueError("no")

        def finish(self, status, summary):
            calls.append(status)

    logger = Fails()
    guard(logger, "mine")
    for step in (1, 2):
        logger.log_metrics({}, step=step)
    logger.finish("finished", {})
    assert calls == [1]
    assert capsys.readouterr().err.count("warning: logger mine failed") == 1


def test_runs_of_a_sweep_are_grouped_by_what_varies_and_not_by_seed():
    overrides = ["block=polar", "optim.lr=0.003", "seed=2", "runs_dir=x"]
    assert what_varies("polar", overrides, {"block", "optim.lr", "seed"}) == "polar, optim.lr=0.003"
    assert what_varies("polar", overrides, {"optim.lr", "seed"}) == "optim.lr=0.003"
    assert what_varies("polar", overrides, {"seed"}) == what_varies("polar", overrides, set()) == "polar"


def test_mlflow_gets_every_row(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    train_run(composed(tmp_path, "logger=mlflow", "name=flow"))
    (run,) = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(
        [mlflow.get_experiment_by_name("polarlm").experiment_id]
    )
    assert run.info.run_name == "flow" and run.data.params["trainer/max_steps"] == "3"
    rows = json_lines(tmp_path / "runs" / "flow" / "metrics.jsonl")
    assert run.data.metrics["train/loss"] == pytest.approx(rows[-1]["train/loss"])


def test_protocols_during_training_join_the_rows_of_their_steps_and_change_nothing(tmp_path):
    options = ("trainer.max_steps=5", "trainer.log_every=2", "model.dropout=0.2", "data.split.val=0.3")
    period = ("callbacks.length.every=3", "callbacks.length.tokens=200", "callbacks.samples.every=2")
    train_run(composed(tmp_path, *options, "name=plain"))
    train_run(composed(tmp_path, *options, "callbacks=[length,samples]", *period, "name=watched"))
    plain, watched = (json_lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("plain", "watched"))
    assert [row["step"] for row in watched] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in watched if "length/2x/loss" in row] == [3, 5]
    losses = {row["step"]: row["train/loss"] for row in watched if "train/loss" in row}
    assert losses == {row["step"]: row["train/loss"] for row in plain}
    samples = json_lines(tmp_path / "runs" / "watched" / "diagnostics" / "samples.jsonl")
    assert [row["step"] for row in samples] == [2, 4, 5] and all(row["text"] for row in samples)
    assert samples[0]["tokens"] == 2 * 128


def test_blimp_during_training_is_the_protocol_of_eval(tmp_path, monkeypatch):
    from polarlm.evaluation.downstream import blimp
    from polarlm.runs.restore import restore_run

    pairs = [{"sentence_good": f"the cat {n} sits", "sentence_bad": f"the cat {n} sit", "UID": "x"} for n in range(20)]
    monkeypatch.setenv("POLARLM_SHARED_DATA", str(tmp_path))
    (tmp_path / "blimp_dev.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, pairs)).encode()))
    train_run(composed(tmp_path, "callbacks=blimp", "callbacks.blimp.examples=null", "name=judged"))
    run = restore_run(tmp_path / "runs" / "judged")
    last = json_lines(tmp_path / "runs" / "judged" / "metrics.jsonl")[-1]
    assert last["blimp/accuracy"] == blimp(run.model, run.tokenizer, pairs)["accuracy"]


def test_trackio_keeps_every_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    from polarlm.training.loggers.trackio import TrackioLogger

    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 64}\n{"step": 2, "tokens": 128, "train/loss": 2.5}\n'
    )
    for newest in (2, 3):
        logger = TrackioLogger(project="p", name="run", folder=str(tmp_path))
        logger.replay()
        logger.log_metrics({"step": newest, "tokens": newest * 64, "train/grad_norm": None}, step=newest)
        logger.experiment.finish()
    assert [row["step"] for row in storage.get_logs("p", "run")] == [1, 2, 3]
