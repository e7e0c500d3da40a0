"""How fast a run is, and how much of the hardware it uses: step-time split, matrix-product peak, MFU.

MFU counts the model's own FLOPs (GPT.flops_per_token: 3 × forward, attention's extra work included), not what the
hardware executes: recomputation earns nothing.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from polarlm.errors import UserError

if TYPE_CHECKING:
    from polarlm.training.recorder import Recorder

MEASUREMENTS = 8  # of the CPU's peak, spread over a run


def gpu_peak(name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the GPU with this name; None, after a warning, for one whose peak we do not know."""
    from polarlm.training.planning.gpus import gpu_named, peak_flops

    gpu = gpu_named(name)
    try:
        if gpu is not None:
            return peak_flops(gpu, precision)
    except UserError:  # no peak in this precision
        pass
    text = f"the peak of a {name} in {precision} is not in our table (polarlm/training/planning/gpus.py): MFU is n/a"
    print(f"warning: {text}", file=sys.stderr, flush=True)
    return None


def compile_seconds() -> float:
    """What torch.compile has taken in this process so far; 0.0 where nothing was compiled."""
    if "torch._dynamo.utils" not in sys.modules:  # importing it takes a second
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


def measured_peak(size: int = 768, seconds: float = 0.3) -> float:
    """FLOP/s of square fp32 matrix products on this CPU with the threads torch uses: the best of a short series."""
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers are left alone
    a, b = torch.randn(2, size, size, generator=generator)
    out = torch.empty(size, size)
    torch.mm(a, b, out=out)
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


class HardwarePeak:
    """What the devices of a run could do at most: known for GPUs, measured now and then for a CPU, else unknown.

    A short measurement on a busy machine is too low and would make the model look better than the hardware; the best
    of several, taken at different times, is what the hardware can do. A share above 1 shows that none was undisturbed:
    it is not told at all.
    """

    def __init__(self, accelerator: str, precision: str, processes: int) -> None:
        self.best: float | None = None
        # Processes on one CPU share its cores: their threads together are what one of them measures.
        self.measures = accelerator == "cpu" and precision == "32-true"
        if accelerator == "cuda":
            one = gpu_peak(torch.cuda.get_device_name(), precision)
            self.best = None if one is None else one * processes
        self._taken = 0

    def due(self, step: int, steps: int) -> bool:
        """Whether a measurement belongs here: before the first step, then after every eighth of the run."""
        return self.measures and self._taken < MEASUREMENTS and step * MEASUREMENTS >= self._taken * steps

    def measure(self, seconds: float = 0.1) -> None:
        """Measure once more and keep the best."""
        self._taken += 1
        self.best = max(self.best or 0.0, measured_peak(seconds=seconds))

    def share(self, flops_per_second: float) -> float | None:
        """Part of the peak that was used (MFU); None where it is unknown or above 1, which no hardware does."""
        return believable_share(flops_per_second, self.best)


def believable_share(flops_per_second: float | None, peak: float | None) -> float | None:
    """flops_per_second / peak, None where either is unknown or the result could not be."""
    if not flops_per_second or not peak or flops_per_second > peak:
        return None
    return flops_per_second / peak


class StepTimes(pl.Callback):
    """Splits the time of a logging step into data, forward, backward and optimiser.

    Only logging steps are watched: the others have no extra work, and on a GPU no synchronisation. Comes first among
    the callbacks, so that validation and probing are in none of the parts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.spent: dict[str, float] | None = None  # None: this step is not watched
        self._at = 0.0
        self._waiting: tuple[float, float] | None = None  # since when, and the recorder's pauses until then

    def _mark(self, module: Any, part: str) -> None:
        if self.spent is None:
            return
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        now = time.perf_counter()
        self.spent[part] = self.spent.get(part, 0.0) + now - self._at
        self._at = now

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_index: int) -> None:
        if batch_index % trainer.accumulate_grad_batches:
            self._mark(module, "data")
            return
        self.spent = None
        if self._waiting is not None:
            since, paused = self._waiting
            self._at = time.perf_counter()
            self.spent = {"data": self._at - since - (self.recorder.paused - paused)}

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._mark(module, "forward")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._mark(module, "backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        self._mark(module, "optimiser")

    def on_step_end(self, trainer: Any, module: Any) -> None:
        if self.spent is not None:
            self.recorder.row |= {f"time/{part}": round(seconds, 6) for part, seconds in self.spent.items()}
        watch = self.recorder.is_log_step(trainer, trainer.global_step + 1)
        self._waiting = (time.perf_counter(), self.recorder.paused) if watch else None
