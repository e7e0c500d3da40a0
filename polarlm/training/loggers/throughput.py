"""How fast a run is, and how much of the hardware it uses: step-time split, matrix-product peak, MFU.

MFU counts the model's own FLOPs (GPT.flops_per_token: 3 × forward, attention's extra work included), not what the
hardware executes: recomputation earns nothing.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch

from polarlm.training.callbacks import Recorder

# Dense peak in TFLOP/s per GPU (vendor data sheets, without sparsity): bf16/fp16, TF32, fp32.
GPU_PEAKS = {
    "H200": (989, 495, 67),
    "H100 PCIe": (756, 378, 51),
    "H100": (989, 495, 67),
    "A100": (312, 156, 19.5),
    "A10G": (70, 35, 31.2),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "A40": (149.7, 74.8, 37.4),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "V100": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
}


def gpu_peak(name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU for a Lightning precision, or None for a GPU that is not in the table (no guess)."""
    for part, (half, tf32, single) in GPU_PEAKS.items():
        if part in name:
            reduced = precision.startswith(("bf16", "16"))
            # "32-true" runs its matrix products in TF32 where the GPU has it (training/hardware.py).
            return 1e12 * (half if reduced else tf32 if tf32 > single or part in ("A100", "H100") else single)
    return None


def measured_peak(size: int = 768, seconds: float = 0.3) -> float:
    """FLOP/s of square fp32 matrix products on this CPU with the threads torch uses: the best of a short series."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    torch.mm(a, b, out=out)
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def hardware_peak(accelerator: str, precision: str, processes: int) -> float | None:
    """Peak FLOP/s of all devices of a run together; None when unknown."""
    if accelerator == "cuda":
        peak = gpu_peak(torch.cuda.get_device_name(), precision)
        return None if peak is None else peak * processes
    if accelerator == "cpu" and precision == "32-true":
        # Processes on one CPU share its cores: their threads together are what was measured once.
        return measured_peak()
    return None


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
        if (batch_index + 1) % trainer.accumulate_grad_batches:
            return
        if self.spent is not None:
            self.recorder.row |= {f"time/{part}": round(seconds, 6) for part, seconds in self.spent.items()}
        watch = self.recorder.is_log_step(trainer, trainer.global_step + 1)
        self._waiting = (time.perf_counter(), self.recorder.paused) if watch else None
