"""The Triton backend: right in the interpreter, compiles without spills, right on a GPU where there is one."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polarlm.errors import UserError
from polarlm.fast import triton_backend
from tests.fast.cases import assert_same, make_case, run

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(not triton_backend.INSTALLED, reason="triton is not installed")


@needs_triton
def test_outputs_and_gradients_in_the_interpreter():
    # Triton decides when it is imported whether it interprets: a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent / "triton_interpreted.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter runs anywhere")
def test_asking_for_triton_without_a_gpu_says_why():
    reason = "CUDA tensors" if triton_backend.INSTALLED else "not installed"
    with pytest.raises(UserError, match=reason):
        run(make_case(dtype=torch.float32), "triton", kernel="student")


VARIANTS, SHAPES = ("polar", "frozen", "everything", "fox"), [(64, "bf16"), (64, "fp32"), (128, "bf16"), (128, "fp32")]
nightly = pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="250 kernels to compile: POLARLM_NIGHTLY=1")
compiles = pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter does not compile")


def some_first(first, every):
    """Cases for every commit, and the others for the night."""
    return [*first, *(pytest.param(*case, marks=nightly) for case in every if case not in first)]


SHIPPED = some_first(
    [("key", "everything", SHAPES[0], 80), ("forward", "fox", SHAPES[3], 90), ("radial", "frozen", SHAPES[0], 80)]
    + [("radial_pairs", "everything", SHAPES[1], 80)],
    product(triton_backend.LAUNCH, VARIANTS, SHAPES, (80, 90, 100)),
)


@needs_triton
@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "variant", "shape", "sm"), SHIPPED)
def test_shipped_block_sizes_compile_and_spill_nothing_in_a_loop(monkeypatch, kernel, variant, shape, sm):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import triton_aot

    assert tuple(triton_aot.VARIANTS) == VARIANTS
    used = triton_aot.compile_kernel(kernel, variant, *shape, sm)
    assert used.spills_per_loop == 0 or shape != SHAPES[0]
    assert used.shared <= 99 * 1024  # what a block may have on any GPU from Ampere on


# Most instructions per pair of forward, query and key kernel (docs/triton.md; 62, 147, 127 before), and the matrix
# instructions that these generations of GPUs are fast with: a tile too small for them takes those of a warp.
INSTRUCTIONS = {
    ("frozen", 80): (35, 61, 48, "HMMA"),
    ("frozen", 90): (34, 60, 46, "HGMMA"),
    ("frozen", 100): (35.5, 75.2, 49.2, "UTCHMMA"),
    ("fox", 90): (18, 20, 25, "HGMMA"),
}
COUNTED = some_first(
    [("forward", "frozen", 90), ("query", "frozen", 90), ("key", "frozen", 90), ("query", "frozen", 100)],
    [(kernel, *where) for kernel in ("forward", "query", "key") for where in INSTRUCTIONS],
)


@needs_triton
@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "variant", "sm"), COUNTED)
def test_instructions_per_pair_of_the_compiled_code(monkeypatch, kernel, variant, sm):
    """Attention is bound by the instructions issued: more of them is slower.

    Far fewer is a wrong count: for sm_100 a kernel waits behind its end, and that jump back once passed for a loop.
    """
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import triton_aot

    *most, matrix = INSTRUCTIONS[variant, sm]
    assert sum(most) <= 161
    used, limit = (
        triton_aot.compile_kernel(kernel, variant, 64, "bf16", sm),
        most[("forward", "query", "key").index(kernel)],
    )
    assert 0.85 * limit < used.per_pair <= limit
    assert (used.spills_per_loop, used.multiplied_by) == (0, matrix)


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(decay_keys=True, decay_values=True)])
@pytest.mark.parametrize("frozen", [False, True])
def test_on_a_gpu(dtype, options, frozen):
    case = make_case(queries=257, size=64, process=bool(options), dtype=dtype)
    if frozen:
        case.noise.nu.requires_grad_(False)[::2] = 3.0
    case = case.each(Tensor.cuda)
    assert_same(case, "triton", 1e-3 if dtype == torch.float32 else 3e-2, kernel="student", **options)
    first, second = (run(case, "triton", kernel="student", **options)[1] for _ in range(2))
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), f"{name} differs between two runs"
