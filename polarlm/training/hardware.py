"""What the machine offers: device, precision, whether compiling pays."""

from __future__ import annotations

import torch

from polarlm.errors import UserError

PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")


def choose_accelerator(wanted: str) -> str:
    """'cpu' or 'cuda' (or what else Lightning knows) for the trainer.accelerator setting."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted in ("gpu", "cuda"):
        if not torch.cuda.is_available():
            raise UserError("trainer.accelerator=gpu, but torch sees no GPU here; use trainer=cpu or trainer=auto")
        return "cuda"
    return wanted


def choose_precision(wanted: str, accelerator: str) -> str:
    """bf16-mixed on GPUs that have it, fp32 elsewhere; anything else as asked."""
    if wanted not in PRECISIONS:
        raise UserError(f"trainer.precision={wanted!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    if wanted != "auto":
        return wanted
    return (
        "bf16-mixed" if accelerator == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    )


def choose_compile(wanted: bool | str, accelerator: str) -> bool:
    """Compile on GPUs (an expectation, not measured yet); on a CPU only when asked (docs/performance.md)."""
    if wanted not in (True, False, "auto"):
        raise UserError(f"trainer.compile={wanted!r} is unknown; choose auto, true or false")
    return accelerator == "cuda" if wanted == "auto" else bool(wanted)


def use_tensor_cores() -> None:
    """TF32 for the fp32 matrix products on GPUs that have it; no effect elsewhere."""
    torch.set_float32_matmul_precision("high")
