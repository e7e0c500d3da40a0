"""Compile the Triton kernels for sm_80, 90 and 100 without a GPU: registers, shared memory and spills of each.

python -m benchmarks.triton_aot [--head-dim 64 128] [--dtype bf16 fp32] [--sm 80 90 100] [--variant polar] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from polarlm.attention.kernels import triton_backend
from polarlm.attention.kernels.noise import NOISE_ROWS, RADIAL_ROWS
from polarlm.attention.kernels.triton_backend import LAUNCH

# Whether keys and values decay, documents are packed, ν learns, and the past fades: Student-t with magnitude, learned
# noise, the Polar block as shipped (a ν that stays, forgetting), and everything together.
VARIANTS = {
    "polar": (False, False, True, False),
    "frozen": (False, False, False, True),
    "everything": (True, True, True, True),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a GPU; spills are bytes of stack per thread."""

    kernel: str
    variant: str
    head_dim: int
    dtype: str
    sm: int
    block_q: int
    block_k: int
    warps: int
    stages: int
    registers: int
    shared: int
    spills: int


class ClaimedGPU:
    """A driver for Triton that has no device to launch on."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.sm  # a cache of compiled kernels for each

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched, if it is the one that is wanted."""

    def __init__(self, function, wanted: bool) -> None:
        self.function, self.wanted = function, wanted
        self.result: Any = None

    def __getitem__(self, grid: tuple):
        return lambda *given, **options: self._compile(*given, grid=grid, **options)

    def _compile(self, *given, **options) -> None:
        if self.wanted:
            self.result = self.function.warmup(*given, **options)


def compile_kernel(name: str, variant: str, head_dim: int, dtype: str, sm: int, override: tuple | None = None) -> Usage:
    """Compile one kernel as the backend launches it (or with the sizes `override`) and see what it uses."""
    from triton.runtime import driver

    from polarlm.attention.kernels import triton_kernels, triton_radial

    decays, packed, learned, forgets = VARIANTS[variant]
    q, k, v, d_out = (torch.randn(1, 2, 250, head_dim, dtype=DTYPES[dtype]) for _ in range(4))
    evidence, m2, parameters = torch.rand(1, 2, 250), torch.rand(1, 250), torch.rand(len(NOISE_ROWS), 2)
    documents = torch.zeros(1, 250, dtype=torch.int32) if packed else None
    forgotten = torch.rand(1, 2, 250) if forgets else None
    inputs = (q, k, v, m2, forgotten, parameters, documents, "student", decays, decays, learned)
    sizes = {key: override or shipped for key, shipped in LAUNCH[name].items()}
    module = triton_radial if name.startswith("radial") else triton_kernels
    names = [f"{x}_kernel" for x in LAUNCH if hasattr(module, f"{x}_kernel")]
    kernels: dict[str, Any] = {x: Compiled(getattr(module, x), x == f"{name}_kernel") for x in names}
    with (
        patch.dict(LAUNCH, {name: sizes}),
        patch.object(driver, "_active", ClaimedGPU(sm)),
        patch.multiple(module, **kernels),
    ):
        if name.startswith("radial"):
            rows = torch.randn(1, 250, 2 * head_dim, dtype=DTYPES[dtype])
            radial = (m2, rows, rows, torch.rand(len(RADIAL_ROWS)), documents, 250)
            triton_backend.triton_radial_backward.bare(m2, m2, m2, *radial)
            triton_backend.triton_radial.bare(*radial)
        elif name == "forward":
            triton_backend.triton_forward.bare(*inputs)
        else:
            triton_backend.triton_backward.bare(d_out, evidence, d_out, evidence, *inputs, True)
    compiled = kernels[f"{name}_kernel"].result
    registers, spills = _resources(compiled.asm["cubin"])
    block_q, block_k, warps, stages = sizes[
        64 if head_dim <= 64 or name.startswith("radial") else 128, q.element_size()
    ]
    launch = block_q, block_k, warps, stages
    return Usage(name, variant, head_dim, dtype, sm, *launch, registers, compiled.metadata.shared, spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread of a compiled kernel; registers are spilled to the stack."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert used is not None, done.stdout
    return int(used[1]), int(used[2])


HEAD = "| kernel | variant | head | dtype | sm | queries × keys | warps | stages | registers | shared | spills |"


def line(used: Usage) -> str:
    """One row of the Markdown table below HEAD."""
    u = used
    return (
        f"| {u.kernel} | {u.variant} | {u.head_dim} | {u.dtype} | {u.sm} | {u.block_q} × {u.block_k} | {u.warps} | "
        f"{u.stages} | {u.registers} | {u.shared / 1024:.1f} KB | {u.spills} |"
    )


def main() -> None:
    """Compile every asked-for combination and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", default=list(LAUNCH), choices=list(LAUNCH))
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--sm", nargs="+", type=int, default=[80, 90, 100])
    parser.add_argument("--blocks", nargs=4, type=int, metavar=("Q", "K", "WARPS", "STAGES"), help="try other sizes")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    print(HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", sep="\n")
    rows = []
    for size, dtype, name, variant, sm in product(
        options.head_dim, options.dtype, options.kernel, options.variant, options.sm
    ):
        rows.append(compile_kernel(name, variant, size, dtype, sm, options.blocks))
        print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
