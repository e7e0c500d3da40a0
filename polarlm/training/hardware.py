"""What the machine offers: device, precision, its peak, whether compiling pays.

`auto` says why it chose what it chose.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from polarlm.errors import UserError
from polarlm.locations import cache_folder
from polarlm.startup import processor

ASKED = "as asked"
WORTH_A_FORMAT = 1.3  # bf16 products this much faster than fp32 ones are worth a hint
# Compiling the whole model on a CPU (docs/performance.md): what it takes, the part of a step it saves, and how far an
# estimate of the saving must lie above the cost. Blocks that are not named were not measured.
COMPILE_SECONDS = 33.0
COMPILE_SAVES = {"standard": 0.1}
MARGIN = 3.0
PART_OF_PEAK = 0.6  # that a training step reaches of the speed of its matrix products


@dataclass(frozen=True)
class Choice:
    """The value chosen for a setting and the reason."""

    value: str
    why: str


def choose_accelerator(wanted: str) -> str:
    """'cpu', 'cuda' or 'mps' (or what else Lightning knows) for the trainer.accelerator setting."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if wanted in ("gpu", "cuda"):
        if not torch.cuda.is_available():
            raise UserError("trainer.accelerator=gpu, but torch sees no GPU here; use trainer=cpu or trainer=auto")
        return "cuda"
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise UserError("trainer.accelerator=mps, but torch sees no Apple GPU here; use trainer=cpu or trainer=auto")
    return wanted


def choose_precision(wanted: str, accelerator: str) -> Choice:
    """bf16-mixed on GPUs that have it, fp32 elsewhere; anything else as asked."""
    if wanted != "auto":
        return Choice(wanted, ASKED)
    if accelerator == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bf16-mixed", "this GPU has bf16")
        return Choice("32-true", "this GPU has no bf16")
    if accelerator != "cpu":
        return Choice("32-true", f"bf16 was never tried on {accelerator}")
    speed = cpu_speed()
    ratio = f"bf16 products are {speed.bf16 / speed.fp32:.2g} times as fast as fp32 ones on this CPU"
    if speed.bf16 < WORTH_A_FORMAT * speed.fp32:
        return Choice("32-true", ratio)
    # Losses are equal within noise, but small models gain little, and one command would give other numbers on other
    # machines: the faster format is the user's decision (docs/performance.md).
    return Choice("32-true", f"{ratio}; trainer.precision=bf16-mixed uses them")


def choose_compile(wanted: bool | str, accelerator: str, block: str, step_flops: float, steps: int) -> Choice:
    """Compile on GPUs (an expectation, not measured yet); on a CPU when a run of this length gains more than it costs.

    All steps of the run count, not the remaining ones: a run that goes on decides as it did when it began.
    """
    if wanted != "auto":
        return Choice("yes" if wanted else "no", ASKED)
    if accelerator == "cuda":
        return Choice("yes", "expected to pay on a GPU, never measured")
    if accelerator != "cpu":
        return Choice("no", f"never tried on {accelerator}")
    if block not in COMPILE_SAVES:
        return Choice("no", f"no gain was measured for {block} on a CPU")
    seconds = steps * step_flops / (PART_OF_PEAK * cpu_speed().fp32)
    saved = COMPILE_SAVES[block] * seconds
    numbers = f"would save about {saved:,.0f} s of {seconds:,.0f} s and takes about {COMPILE_SECONDS:.0f} s"
    return Choice("yes" if saved > MARGIN * COMPILE_SECONDS else "no", f"compiling {numbers}")


def compiled_loss(model: Any, **options: Any) -> Callable[..., Tensor]:
    """`model.loss` compiled with torch.compile's options; one row of the first batch goes through the model before.

    There attention chooses its backend and compares kernels, for what will be compiled: with gradients. FlexAttention's
    kernels are compiled for that, and torch gives up on a model while whose compilation another one ran (RuntimeError
    about its metrics).
    """
    compiled, chosen = torch.compile(model.loss, **options), False

    def loss(tokens: Tensor, targets: Tensor, documents: Tensor | None = None, reduction: str = "mean") -> Tensor:
        nonlocal chosen
        if not chosen:
            chosen = True
            with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
                model.loss(tokens[:1], targets[:1], documents=None if documents is None else documents[:1])
        return compiled(tokens, targets, documents=documents, reduction=reduction)

    return loss


def use_tensor_cores() -> None:
    """TF32 for the fp32 matrix products on GPUs that have it; no effect elsewhere."""
    torch.set_float32_matmul_precision("high")


# -- the speed of this machine's matrix products, measured once in a few milliseconds, then remembered -----------------


SIZE = 128
SECONDS = 0.02  # of processor time per precision: bf16 without hardware for it is up to a hundred times slower


@dataclass(frozen=True)
class Speed:
    """FLOP/s of square matrix products on all threads together."""

    fp32: float
    bf16: float


def cpu_speed() -> Speed:
    """This machine's speed with the threads torch uses, from its file or measured now."""
    key = f"{processor()}|{torch.get_num_threads()}|{torch.__version__}|processor time"
    try:
        path = cache_folder() / f"speed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        return Speed(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        speed = measure_products()
        path.write_text(json.dumps(asdict(speed)), encoding="utf-8")
        return speed
    except (OSError, ValueError, TypeError):  # no place to remember it, or half a file
        return measure_products()


def measure_products() -> Speed:
    """Products in each precision; the run's own random numbers are left alone.

    One thread is measured, by its processor time: on a busy machine threads wait for each other, and by the wall clock
    a product then took a thousand times as long, which was remembered for ever.
    """
    drawn = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    threads, rates = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            a = drawn.to(dtype)
            out = torch.mm(a, a)  # the first one prepares
            products, began, spent = 0, time.thread_time(), 0.0
            while spent < SECONDS:
                torch.mm(a, a, out=out)
                products, spent = products + 1, time.thread_time() - began
            rates.append(threads * products * 2 * SIZE**3 / spent)
    finally:
        torch.set_num_threads(threads)
    return Speed(*rates)


# -- how much of the hardware a run uses (MFU) -------------------------------------------------------------------------
#
# MFU counts the model's own FLOPs (GPT.flops_per_token: 3 × forward, attention's extra work included), not what the
# hardware executes: recomputation earns nothing.


MEASUREMENTS = 8  # of the CPU's peak, spread over a run


def gpu_peak(name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the GPU with this name; None, after a warning, for one whose peak we do not know."""
    from polarlm.training.gpus import gpu_named, peak_flops

    gpu = gpu_named(name)
    try:
        if gpu is not None:
            return peak_flops(gpu, precision)
    except UserError:  # no peak in this precision
        pass
    text = f"the peak of a {name} in {precision} is not in our table (polarlm/training/gpus.py): MFU is n/a"
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
