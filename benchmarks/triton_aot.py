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

from polarlm.attention.kernels.triton_backend import LAUNCH, launch_options

# The Polar block (Student-t with magnitude), and the same with RFA's decays and documents on top.
VARIANTS = {
    "polar": dict(KERNEL="student", MAGNITUDE=True, DECAY_KEYS=False, DECAY_VALUES=False, DOCUMENTS=False),
    "everything": dict(KERNEL="student", MAGNITUDE=True, DECAY_KEYS=True, DECAY_VALUES=True, DOCUMENTS=True),
}
MATRICES = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a GPU; spills are in bytes per thread."""

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


def compile_kernel(name: str, variant: str, head_dim: int, dtype: str, sm: int, override: tuple | None = None) -> Usage:
    """Compile one kernel with the block sizes that are shipped (or `override`) and ask ptxas what it uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from polarlm.attention.kernels import triton_kernels

    function = getattr(triton_kernels, f"{name}_kernel")
    blocks, options = launch_options(name, head_dim, BYTES[dtype])
    if override is not None:
        blocks |= dict(BLOCK_Q=override[0], BLOCK_K=override[1])
        options = dict(num_warps=override[2], num_stages=override[3])
    constants = {
        **VARIANTS[variant],
        **blocks,
        "GROUP": 1,
        "SIZE": head_dim,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
    }
    if name == "query":
        constants["NOISE_LEARNS"] = True
    if not constants["DOCUMENTS"]:
        constants["documents"] = None
    signature, attributes = {}, {}
    for place, argument in enumerate(function.arg_names):
        kind = _type_of(argument, dtype)
        signature[argument] = "constexpr" if argument in constants else kind
        # As at run time: tensors are aligned, and strides are multiples of the head size.
        if argument not in constants and (kind.startswith("*") or argument[1:] in ("_b", "_h", "_t")):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, spills = _ptxas(compiled.asm["ptx"])
    return Usage(
        name, variant, head_dim, dtype, sm, blocks["BLOCK_Q"], blocks["BLOCK_K"], options["num_warps"],
        options["num_stages"], registers, compiled.metadata.shared, spills,
    )  # fmt: skip


def _type_of(argument: str, dtype: str) -> str:
    if argument in MATRICES:
        return f"*{dtype}"
    if argument == "documents":
        return "*i32"
    if argument in ("queries", "keys", "heads") or argument[1:] in ("_b", "_h", "_t"):
        return "i32"
    return "*fp32"


def _ptxas(ptx: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, from the first of Triton's own assemblers that knows this PTX version."""
    import triton.backends.nvidia

    target = re.search(r"\.target (\w+)", ptx).group(1)
    for tool in sorted((Path(triton.backends.nvidia.__file__).parent / "bin").glob("ptxas*")):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernel.ptx").write_text(ptx)
            command = [str(tool), "-v", f"-arch={target}", "-o", "kernel.cubin", "kernel.ptx"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            registers = max(int(x) for x in re.findall(r"Used (\d+) registers", done.stderr))
            return registers, sum(int(x) for x in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr))
    raise RuntimeError(f"no ptxas of Triton accepts this PTX for {target}: {done.stderr}")


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
    parser.add_argument("--dtype", nargs="+", default=list(BYTES), choices=list(BYTES))
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
