"""What `auto` chooses on which machine, and that it says why."""

from __future__ import annotations

import pytest
import torch

from polarlm.errors import UserError
from polarlm.training import hardware
from polarlm.training.hardware import Speed


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    def with_speed(fp32: float, bf16: float) -> None:
        monkeypatch.setattr(hardware, "cpu_speed", lambda: Speed(fp32, bf16))

    return with_speed


def test_a_cpu_without_bf16_trains_in_fp32_and_says_what_was_measured(cpu) -> None:
    cpu(100e9, 1e9)
    choice = hardware.choose_precision("auto", "cpu")
    assert choice.value == "32-true" and "0.01 times as fast" in choice.why and "trainer.precision" not in choice.why


def test_a_cpu_with_fast_bf16_is_told_but_not_used(cpu) -> None:
    cpu(100e9, 220e9)
    choice = hardware.choose_precision("auto", "cpu")
    assert choice.value == "32-true" and "2.2 times" in choice.why and "trainer.precision=bf16-mixed" in choice.why


@pytest.mark.parametrize("wanted", ["32-true", "bf16-mixed", "64-true"])
def test_a_fixed_precision_wins_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(hardware, "cpu_speed", lambda: pytest.fail("measured"))
    assert hardware.choose_precision(wanted, "cpu") == hardware.Choice(wanted, hardware.ASKED)
    assert hardware.choose_compile(False, "cpu", "standard", 1e12, 10) == hardware.Choice("no", hardware.ASKED)


def test_an_apple_gpu_is_found_after_cuda_and_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert hardware.choose_accelerator("auto") == "mps"
    assert hardware.choose_precision("auto", "mps").value == "32-true"
    assert hardware.choose_compile("auto", "mps", "standard", 1e12, 10**9).value == "no"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert hardware.choose_accelerator("auto") == "cpu"
    with pytest.raises(UserError, match=r"trainer\.accelerator=mps, but torch sees no Apple GPU here"):
        hardware.choose_accelerator("mps")


def test_a_run_is_compiled_where_it_saves_clearly_more_than_compiling_takes(cpu) -> None:
    cpu(100e9, 1e9)
    seconds = hardware.MARGIN * hardware.COMPILE_SECONDS / hardware.COMPILE_SAVES["standard"]
    steps = round(seconds * hardware.PART_OF_PEAK * 100e9 / 1e9)  # of 1 GFLOP
    assert hardware.choose_compile("auto", "cpu", "standard", 1e9, steps - 10).value == "no"
    longer = hardware.choose_compile("auto", "cpu", "standard", 1e9, steps + 10)
    assert longer.value == "yes" and "takes about 33 s" in longer.why
    unknown = hardware.choose_compile("auto", "cpu", "my_block", 1e9, 10**9)
    assert unknown.value == "no" and "no gain was measured for my_block" in unknown.why


def test_the_speed_is_measured_once_per_machine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path))
    state = torch.get_rng_state()
    first = hardware.cpu_speed()
    assert first.fp32 > 0 and first.bf16 > 0 and torch.equal(state, torch.get_rng_state())
    monkeypatch.setattr(hardware, "measure_products", lambda: pytest.fail("measured again"))
    assert hardware.cpu_speed() == first
    (file,) = tmp_path.glob("*/speed-*.json")
    file.write_text('{"fp32": 1')
    monkeypatch.setattr(hardware, "measure_products", lambda: Speed(1.0, 2.0))
    assert hardware.cpu_speed() == Speed(1.0, 2.0), "half a file is measured again"


def test_a_busy_machine_is_not_taken_for_a_slow_one() -> None:
    """By the wall clock two threads on busy cores looked 3,000 times slower, for ever."""
    import threading
    import time

    quiet, over = hardware.measure_products(), threading.Event()

    def disturb() -> None:
        while not over.is_set():
            sum(range(1000))

    others = [threading.Thread(target=disturb, daemon=True) for _ in range(4)]
    for other in others:
        other.start()
    try:
        began = time.perf_counter()
        busy = hardware.measure_products()
        waited = time.perf_counter() - began
    finally:
        over.set()
        for other in others:
            other.join()
    assert waited > 0 and 1 / 5 < busy.fp32 / quiet.fp32 < 5
