from polarlm.launch.table import step_split
from polarlm.training.finish import median
from polarlm.training.loggers.throughput import gpu_peak, hardware_peak, measured_peak


def test_known_gpus_have_a_peak_per_precision_and_unknown_ones_have_none():
    assert gpu_peak("NVIDIA A100-SXM4-80GB", "bf16-mixed") == 312e12
    assert gpu_peak("NVIDIA A100-SXM4-80GB", "32-true") == 156e12
    assert gpu_peak("NVIDIA H100 PCIe", "bf16-mixed") == 756e12
    assert gpu_peak("NVIDIA H100 80GB HBM3", "bf16-mixed") == 989e12
    assert gpu_peak("NVIDIA T4", "16-mixed") == 65e12
    assert gpu_peak("Some New GPU", "bf16-mixed") is None


def test_the_cpu_peak_is_measured_and_an_unmeasured_precision_is_unknown():
    assert 1e8 < measured_peak(size=128, seconds=0.02) < 1e14
    assert hardware_peak("cpu", "bf16-mixed", 1) is None


def test_a_typical_step_is_the_median_without_the_first_warming_up():
    rows = [{"x": 100.0}, {"x": 1.0}, {"y": 5}, {"x": 3.0}, {"x": 2.0}]
    assert median(rows, "x") == 2.0
    assert median(rows[:1], "x") == 100.0
    assert median([], "x") is None


def test_the_split_of_a_step_is_told_in_percent_and_unknown_is_not_zero():
    assert step_split({"data": 0.001, "forward": 0.003, "optimiser": None}) == "4 ms: data 25 %, forward 75 %"
    assert step_split({}) == "n/a"
