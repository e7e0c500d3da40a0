"""What makers publish about their GPUs: memory, links, and dense peak FLOP/s; importable without torch.

Peaks come from Lightning's table where that has the dense numbers; its H200 row counts sparsity, and it has no B200.
Links are per GPU and direction (half of the "total bandwidth" of a data sheet): NVLink or PCIe inside a node, and the
network adapters of the maker's own 8-GPU machine between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polarlm.errors import UserError
from polarlm.settings import setting

BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; bandwidths in GB/s, memory in GB (10⁹ bytes)."""

    title: str
    memory: float
    inside: float  # to other GPUs of its node
    between: float  # to other nodes
    table: str | None = None  # its name in Lightning's table of peaks
    peaks: dict[str, float] = field(
        default_factory=dict
    )  # FLOP/s by bf16 | 16 | tf32 | 64, where the table can't be used
    bf16: bool = True


GPUS = {
    "b200": Gpu("B200 SXM", 180, 900, 50, peaks={"bf16": 2.25e15, "16": 2.25e15, "tf32": 1.1e15, "64": 37e12}),
    "h200": Gpu("H200 SXM", 141, 450, 50, peaks={"bf16": 989.4e12, "16": 989.4e12, "tf32": 494.7e12, "64": 33.5e12}),
    "h100": Gpu("H100 SXM", 80, 450, 400 / BITS_PER_BYTE, "h100 sxm"),
    "h100-pcie": Gpu("H100 PCIe", 80, 64, 50, "h100 pcie"),
    "a100": Gpu("A100 SXM 80 GB", 80, 300, 200 / BITS_PER_BYTE, "a100"),
    "a100-40": Gpu("A100 SXM 40 GB", 40, 300, 25, "a100"),
    "a10g": Gpu("A10G", 24, 32, 3.125, "a10g"),
    "l40": Gpu("L40", 48, 32, 25, "l40"),
    "l4": Gpu("L4", 24, 32, 3.125, "l4"),
    "v100": Gpu("V100 SXM 32 GB", 32, 150, 6.25, "v100 sxm", bf16=False),
}


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
    kind = {"bf16": "bf16", "16": "16", "64": "64"}.get(precision.partition("-")[0], "tf32")
    if gpu.table is None:
        return gpu.peaks[kind]
    import torch
    from lightning.fabric.utilities.throughput import _CUDA_FLOPS

    known = _CUDA_FLOPS[gpu.table]
    keys: dict[str, list[Any]] = {"bf16": [torch.bfloat16], "16": [torch.float16], "64": [torch.float64]}
    for key in keys.get(kind, ["tfloat32", torch.float32]):
        if key in known:
            return float(known[key])
    raise UserError(f"trainer.precision={precision}: no peak is published for a {gpu.title}; choose another precision.")
