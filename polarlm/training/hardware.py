"""What the machine offers: device, precision, whether compiling pays. `auto` says why it chose what it chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polarlm.errors import UserError
from polarlm.training.machine import cpu_speed

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


def use_tensor_cores() -> None:
    """TF32 for the fp32 matrix products on GPUs that have it; no effect elsewhere."""
    torch.set_float32_matmul_precision("high")
