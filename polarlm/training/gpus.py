"""Published data of GPUs: memory, links, and dense peak FLOP/s; importable without torch.

Used to plan runs and to compute MFU. Peaks are the data
sheets' dense numbers (half of what is given "with sparsity") of matrix products that accumulate in fp32. Links are per
GPU and direction (half of a data sheet's "total bandwidth"): NVLink or PCIe inside a node, and the network adapters of
the maker's own 8-GPU machine between nodes (cards that have none: 10 Gbit/s).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polarlm.errors import UserError
from polarlm.settings import setting

BITS_PER_BYTE = 8
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; memory in GB (10⁹ bytes), bandwidths in GB/s, peaks in TFLOP/s."""

    title: str
    name: str  # regular expression of the name that the driver gives it
    memory: float
    inside: float  # to other GPUs of its node
    between: float  # to other nodes
    half: float  # fp16, and bf16 where it has that
    single: float  # fp32 products: TF32 where it has that
    double: float | None = None
    bf16: bool = True


# The first row that fits a name is taken. Sources: NVIDIA's data sheets of the products of that name, and for
# GeForce and RTX cards the tables "with FP32 accumulate" of the architecture white papers (GA102, Ada, Blackwell).
GPUS = {
    "gb200": Gpu("GB200", r"GB200", 186, 900, 50, 2500, 1250, 40),
    "b200": Gpu("B200 SXM", r"B200", 180, 900, 50, 2250, 1100, 37),
    "gh200": Gpu("GH200", r"GH200", 96, 450, 50, 989.4, 494.7, 67),
    "h200-nvl": Gpu("H200 NVL", r"H200 NVL", 141, 450, 50, 835.5, 417.7, 60),
    "h200": Gpu("H200 SXM", r"H200", 141, 450, 50, 989.4, 494.7, 67),
    "h100-pcie": Gpu("H100 PCIe", r"H100 PCIe", 80, 64, 50, 756, 378, 51),
    "h100-nvl": Gpu("H100 NVL", r"H100 NVL", 94, 300, 50, 835.5, 417.7, 60),
    "h100": Gpu("H100 SXM", r"H100", 80, 450, 400 / BITS_PER_BYTE, 989.4, 494.7, 67),
    "a100-40": Gpu("A100 SXM 40 GB", r"A100-.*40GB", 40, 300, 25, 312, 156, 19.5),
    "a100": Gpu("A100 SXM 80 GB", r"A100", 80, 300, 200 / BITS_PER_BYTE, 312, 156, 19.5),
    "a40": Gpu("A40", r"A40", 48, 56, 25, 149.7, 74.8),
    "a10g": Gpu("A10G", r"A10G", 24, 32, 3.125, 70, 35),
    "a10": Gpu("A10", r"A10", 24, 32, 3.125, 125, 62.5),
    "l40s": Gpu("L40S", r"L40S", 48, 32, 25, 362, 183),
    "l40": Gpu("L40", r"L40", 48, 32, 25, 181, 90.5),
    "l4": Gpu("L4", r"L4", 24, 32, 3.125, 121, 60),
    "pro-6000": Gpu("RTX PRO 6000 Blackwell", r"RTX PRO 6000 Blackwell .*Edition", 96, 64, 1.25, 503.8, 251.9),
    "6000-ada": Gpu("RTX 6000 Ada", r"RTX 6000 Ada Generation", 48, 32, 1.25, 364.2, 182.1),
    "a6000": Gpu("RTX A6000", r"RTX A6000", 48, 56, 1.25, 154.8, 77.4),
    "rtx5090": Gpu("GeForce RTX 5090", r"RTX 5090", 32, 64, 1.25, 209.5, 104.8),
    "rtx5080": Gpu("GeForce RTX 5080", r"RTX 5080", 16, 64, 1.25, 112.6, 56.3),
    "rtx4090": Gpu("GeForce RTX 4090", r"RTX 4090", 24, 32, 1.25, 165.2, 82.6),
    "rtx4080": Gpu("GeForce RTX 4080", r"RTX 4080", 16, 32, 1.25, 97.5, 48.7),
    "rtx3090-ti": Gpu("GeForce RTX 3090 Ti", r"RTX 3090 Ti", 24, 32, 1.25, 80, 40),
    "rtx3090": Gpu("GeForce RTX 3090", r"RTX 3090", 24, 32, 1.25, 71, 35.6),
    "rtx3080": Gpu("GeForce RTX 3080", r"RTX 3080", 10, 32, 1.25, 59.5, 29.8),
    "v100": Gpu("V100 SXM 32 GB", r"V100-SXM\d", 32, 150, 6.25, 125, 15.7, 7.8, bf16=False),
    "t4": Gpu("T4", r"T4", 16, 16, 3.125, 65, 8.1, bf16=False),
}
# What may follow the name of a product: its maker's words for memory and socket. "Laptop GPU", "D", a slice (MIG) and
# other words make it another product, whose peak we do not know.
SUFFIX = r"(?:[- ](?:NVIDIA|SXM\d|PCIE|PCIe|HBM\w+|\d+GB?))*"


def gpu_named(device_name: str) -> Gpu | None:
    """The GPU with the name that torch.cuda.get_device_name gives, None for one that is not in the table."""
    for gpu in GPUS.values():
        if re.fullmatch(rf"(?:NVIDIA |Tesla |GeForce |Quadro )*{gpu.name}{SUFFIX}", device_name):
            return gpu
    return None


@dataclass(frozen=True)
class PlanSettings:
    """What `inspect --plan` takes beside the settings of a run."""

    gpus: int = setting(at_least=1, at_most=100_000)
    gpu: str = setting(choices=tuple(GPUS))
    per_node: int = setting(8, at_least=1)
    mfu: float = setting(0.4, above=0, at_most=1)
    vocab: int | None = setting(None, at_least=2)


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Dense FLOP/s of matrix products in a Lightning precision; fp32 products run as TF32 where the GPU has it."""
    kind = {"bf16": "half", "16": "half", "64": "double"}.get(precision.partition("-")[0], "single")
    peak = getattr(gpu, kind)
    if peak is None or (precision.startswith("bf16") and not gpu.bf16):
        raise UserError(
            f"trainer.precision={precision}: no peak is published for a {gpu.title}; choose another precision."
        )
    return float(peak * TERA)
