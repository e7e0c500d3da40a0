"""Speed and its share of the hardware's peak: measured honestly, or not told."""

import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from polarlm.launch.train import share_of_peak, speed, step_split
from polarlm.training import hardware
from polarlm.training.hardware import MEASUREMENTS, HardwarePeak, believable_share, gpu_peak, measured_peak
from polarlm.training.loop import median
from polarlm.training.recorder import Recorder
from tests.training.tiny_jobs import fitted


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA A100 80GB PCIe", "32-true", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4e12),
        ("NVIDIA H100 NVL", "bf16-mixed", 835.5e12),
        ("NVIDIA H200", "bf16-mixed", 989.4e12),
        ("NVIDIA GH200 480GB", "bf16-mixed", 989.4e12),
        ("NVIDIA B200", "bf16-mixed", 2250e12),
        ("NVIDIA GB200", "bf16-mixed", 2500e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L40", "bf16-mixed", 181e12),
        ("NVIDIA GeForce RTX 5090", "bf16-mixed", 209.5e12),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2e12),
        ("NVIDIA GeForce RTX 3090", "bf16-mixed", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", 80e12),
        ("Tesla T4", "16-mixed", 65e12),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125e12),
    ],
)
def test_a_gpus_peak_is_the_data_sheets_dense_one(name, precision, peak):
    assert gpu_peak(name, precision) == peak


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Some New GPU", "bf16-mixed"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed"),
        ("NVIDIA GeForce RTX 4090 D", "bf16-mixed"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed"),
        ("Tesla T4", "bf16-mixed"),
        ("NVIDIA L4", "64-true"),
    ],
)
def test_a_peak_that_is_not_known_is_never_guessed_and_said_to_be_missing(name, precision, capsys):
    assert gpu_peak(name, precision) is None
    assert name in (said := capsys.readouterr().err) and "MFU is n/a" in said


def test_the_cpu_peak_is_measured_without_touching_the_runs_random_numbers():
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(size=128, seconds=0.02) < 1e14
    assert torch.equal(torch.get_rng_state(), before)


def test_the_best_of_several_measurements_spread_over_the_run_counts(monkeypatch):
    peaks = iter([3e9, 9e9, 5e9, 1e9, 1e9, 1e9, 1e9, 1e9])
    monkeypatch.setattr(hardware, "measured_peak", lambda seconds: next(peaks))
    peak = HardwarePeak("cpu", "32-true", 1)
    taken = []
    for step in range(0, 1001):
        if peak.due(step, 1000):
            peak.measure()
            taken.append(step)
    assert len(taken) == MEASUREMENTS and taken[:3] == [0, 125, 250]
    assert peak.best == 9e9
    assert peak.share(4.5e9) == pytest.approx(0.5)


def test_more_than_the_peak_is_not_believed_and_not_printed():
    assert believable_share(2.69e9, 1e9) is None and believable_share(1e9, None) is None
    assert share_of_peak(None) == "" and "12 %" in share_of_peak(0.12)
    assert HardwarePeak("cpu", "bf16-mixed", 1).due(0, 10) is False


def test_tokens_per_second_and_seconds_of_the_final_table_count_the_same_time():
    times = {"tokens": 120_000, "seconds": 90.0, "training_seconds": 60.0}
    line = speed(times | {"tokens_per_second": 3000.0, "compile_seconds": 20.0})
    assert line == (
        "120,000 in 1:00 of training (3.0k tokens/s), 0:20 of it compiling, 0:30 more for validation and diagnostics"
    )
    assert "(speed n/a" in speed(times | {"tokens_per_second": None})


def test_speed_is_that_of_the_steady_state_and_compiling_is_told_apart(tmp_path, monkeypatch):
    """The first step warms up for 0.5 s; the third compiles again for 0.4 s, which torch accounts for."""
    compiled = 0.0
    monkeypatch.setattr("polarlm.training.recorder.compile_seconds", lambda: compiled)

    class Slow(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_index):
            nonlocal compiled
            if batch_index in (0, 4):  # steps 1 and 3, of two micro-batches each
                time.sleep(0.5 if batch_index == 0 else 0.4)
                compiled += 0.4

    rows = fitted(tmp_path, tmp_path / "run", extra=(Slow(),))
    assert "tokens_per_second" not in rows[0] and rows[0]["training_seconds"] > 0.5
    assert [row["compile_seconds"] for row in rows] == [0.4, 0.4, 0.8]
    assert rows[2]["training_seconds"] - rows[1]["training_seconds"] > 0.4
    with_compiling = 128 / (rows[2]["training_seconds"] - rows[1]["training_seconds"])
    assert rows[2]["tokens_per_second"] > 1.5 * with_compiling


def test_pauses_are_in_the_total_time_but_not_in_training_time_also_after_a_restart(monkeypatch, tmp_path):
    rows = []
    logger = SimpleNamespace(log_metrics=lambda row, step: rows.append(row))
    device = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(
        loggers=[logger], global_step=0, max_steps=10, world_size=1, strategy=device, callback_metrics={}
    )
    recorder = Recorder(tmp_path, batch_tokens=64, flops_per_token=10, log_every=1)
    recorder.load_state_dict({"seconds": 100.0, "paused": 40.0, "processor": 30.0})
    recorder.on_train_start(trainer, None)
    with recorder.pause():
        time.sleep(0.05)
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    recorder.write(trainer, 1)
    assert rows[0]["seconds"] >= 100.25
    assert rows[0]["seconds"] - rows[0]["training_seconds"] >= 40.25
    assert rows[0]["training_seconds"] == pytest.approx(rows[0]["seconds"] - recorder.state_dict()["paused"], abs=2e-3)
    assert 30.0 <= rows[0]["processor_seconds"] < 30.2  # neither the pause nor sleeping counts
    assert 30.0 <= recorder.state_dict()["processor"] < 30.2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # threads that wait for each other spin
    recorder.write(trainer, 2)
    assert "processor_seconds" not in rows[1]


def test_a_typical_step_is_the_median_without_the_first_warming_up():
    rows = [{"x": 100.0}, {"x": 1.0}, {"y": 5}, {"x": 3.0}, {"x": 2.0}]
    assert median(rows, "x") == 2.0
    assert median(rows[:1], "x") == 100.0
    assert median([], "x") is None


def test_the_split_of_a_step_is_told_in_percent_and_unknown_is_not_zero():
    assert step_split({"data": 0.001, "forward": 0.003, "optimiser": None}) == "4 ms: data 25 %, forward 75 %"
    assert step_split({}) == "n/a"
