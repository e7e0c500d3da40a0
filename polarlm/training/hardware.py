"""What the machine offers: device, precision, whether compiling pays. `auto` says why it chose what it chose."""

from __future__ import annotations

import hashlib
import json
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
    """A setting's value, and why."""

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
