"""Compile the Triton kernels for sm_80, 90 and 100 without a GPU: registers, shared memory, spills and instructions.

Attention here is bound by the instructions that a GPU can issue, so instructions per query-key pair tell the time: an
H100 issues 132 × 128 × 1.755 GHz = 29.7 per picosecond.

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

from polarlm.attention.robust.call import NOISE_ROWS, RADIAL_ROWS
from polarlm.fast import triton_backend
from polarlm.fast.triton_backend import LAUNCH, NARROWER, block_sizes


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for."""

    decays: bool = False  # keys and values
    packed: bool = False
    learned: bool = True  # ν
    forgets: bool = False
    fox: bool = False  # soft-max attention with forget gates


# Student-t with magnitude and learned noise; the Polar block as shipped (ν stays 3, forgetting); everything together;
# and the baselines with forget gates.
VARIANTS = {
    "polar": Variant(),
    "frozen": Variant(learned=False, forgets=True),
    "everything": Variant(decays=True, packed=True, forgets=True),
    "fox": Variant(learned=False, forgets=True, fox=True),
}
PRODUCT = re.compile(r"[HQIU]\w*MMA|UTC\w*MMA")  # matrix instructions
Blocks = tuple[int, int, int, int]  # queries, keys, warps, stages
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
    per_pair: float  # instructions of the main loop, per query-key pair
    multiplied_by: str  # its matrix instructions: HMMA, of a warp; HGMMA (wgmma), UTCHMMA (tensor memory)
    spills_per_loop: int  # loads and stores of spilled registers, in the loop that has most of them


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


def compile_kernel(
    name: str, variant: str, head_dim: int, dtype: str, sm: int, override: Blocks | None = None
) -> Usage:
    """Compile one kernel as the backend launches it (or with the sizes `override`) and see what it uses."""
    from triton.runtime import driver

    from polarlm.fast import triton_kernels, triton_radial

    v = VARIANTS[variant]
    q, k, values, d_out = (torch.randn(1, 2, 250, head_dim, dtype=DTYPES[dtype]) for _ in range(4))
    evidence, parameters = torch.rand(1, 2, 250), torch.rand(len(NOISE_ROWS), 2)
    m2 = torch.rand(1, 250)
    documents = torch.zeros(1, 250, dtype=torch.int32) if v.packed else None
    forgotten = torch.rand(1, 2, 250) if v.forgets else None
    inputs: tuple[Any, ...] = (q, k, values, None if v.fox else m2, forgotten, parameters, documents)
    inputs += ("exponential" if v.fox else "student", v.fox, v.fox, v.decays, v.decays, v.learned)
    sizes = {key: override or shipped for key, shipped in LAUNCH[name].items()}
    kind = (64 if head_dim <= 64 or name.startswith("radial") else 128, q.element_size())
    launch = override or block_sizes(name, kind, v.decays, sm)
    module = triton_radial if name.startswith("radial") else triton_kernels
    names = [f"{x}_kernel" for x in LAUNCH if hasattr(module, f"{x}_kernel")]
    kernels: dict[str, Any] = {x: Compiled(getattr(module, x), x == f"{name}_kernel") for x in names}
    with (
        patch.dict(LAUNCH, {name: sizes}),
        patch.dict(NARROWER, clear=override is not None),
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
            triton_backend.triton_backward.bare(d_out, *[evidence] * 4, *inputs, not v.fox)
    compiled = kernels[f"{name}_kernel"].result
    registers, spills = _resources(compiled.asm["cubin"])
    pairs_per_thread = launch[0] * launch[1] / (32 * launch[2])
    loops = loops_of_products(compiled.asm["cubin"])
    spilled = max(sum(instruction.startswith(("LDL", "STL")) for instruction in loop) for loop in loops)
    # Of several forms the shortest is the one that mostly runs.
    main_loop = min(loops, key=len)
    per_pair = len(main_loop) / pairs_per_thread
    matrix = "+".join(sorted({x[0] for x in map(PRODUCT.match, main_loop) if x}))
    shared = compiled.metadata.shared
    return Usage(name, variant, head_dim, dtype, sm, *launch, registers, shared, spills, per_pair, matrix, spilled)


def _tool(name: str, cubin: bytes, *options: str) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread of a compiled kernel; registers are spilled to the stack."""
    used = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "--dump-resource-usage"))
    assert used is not None
    return int(used[1]), int(used[2])


def loops_of_products(cubin: bytes) -> list[list[str]]:
    """The instructions of every loop that multiplies matrices.

    For sm_100 a kernel waits behind its end and jumps back to where it left: what lies between is no loop.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    code = re.compile(r"^\s*\.section\s+\.text.*?(?=^\s*\.section\s|\Z)", re.M | re.S)
    for text in code.findall(_tool("nvdisasm", cubin)):
        for label, instruction in re.findall(r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.M):
            if label:
                labels[label] = len(instructions)
            else:
                instructions.append(re.sub(r"^@!?U?P\w+\s+", "", instruction))
    loops = []
    for at, instruction in enumerate(instructions):
        target = re.match(r"BRA\S*.*`\((\.L\w+)\)", instruction)
        if target and labels[target[1]] < at:
            loops.append(instructions[labels[target[1]] : at + 1])
    loops = [loop for loop in loops if not any(x.startswith("EXIT") for x in loop)]
    return [loop for loop in loops if any(PRODUCT.match(x) for x in loop)]


HEAD = (
    "| kernel | variant | head | dtype | sm | queries × keys | warps | stages | registers | shared | spills | "
    "per pair | products |"
)


def line(used: Usage) -> str:
    """One row of the Markdown table below HEAD."""
    u = used
    return (
        f"| {u.kernel} | {u.variant} | {u.head_dim} | {u.dtype} | {u.sm} | {u.block_q} × {u.block_k} | {u.warps} | "
        f"{u.stages} | {u.registers} | {u.shared / 1024:.1f} KB | {u.spills} | {u.per_pair:.1f} | {u.multiplied_by} |"
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
        rows.append(compile_kernel(name, variant, size, dtype, sm, options.blocks and tuple(options.blocks)))
        print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
