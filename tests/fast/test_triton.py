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
FIRST = ("frozen", SHAPES[0], 80), ("everything", SHAPES[0], 80), ("frozen", SHAPES[0], 100), ("fox", SHAPES[3], 90)
nightly = pytest.mark.skipif("POLARLM_NIGHTLY" not in os.environ, reason="220 kernels to compile: POLARLM_NIGHTLY=1")
OTHERS = [pytest.param(*x, marks=nightly) for x in product(VARIANTS, SHAPES, (80, 90, 100)) if x not in FIRST]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "shape", "sm"), [*FIRST, *OTHERS])
@pytest.mark.parametrize("kernel", list(triton_backend.LAUNCH))
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter does not compile")
def test_shipped_block_sizes_compile_and_spill_nothing_in_a_loop(monkeypatch, kernel, variant, shape, sm):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import triton_aot

    assert tuple(triton_aot.VARIANTS) == VARIANTS
    used = triton_aot.compile_kernel(kernel, variant, *shape, sm)
    assert used.spills_per_loop == 0 or shape != SHAPES[0]
    assert used.shared <= 99 * 1024  # what a block may have on any GPU from Ampere on


@needs_triton
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("variant", "most"), [("frozen", (34, 60, 46)), pytest.param("fox", (18, 20, 25), marks=pytest.mark.slow)]
)
def test_instructions_per_pair_of_the_compiled_code(monkeypatch, variant, most):
    """Attention is bound by the instructions issued: more of them is slower (docs/triton.md; 62, 147, 127 before)."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import triton_aot

    kernels = ("forward", "query", "key")
    used = [triton_aot.compile_kernel(kernel, variant, 64, "bf16", 90) for kernel in kernels]
    assert [u.spills_per_loop for u in used] == [0, 0, 0]
    assert [u.kernel for u, limit in zip(used, most) if u.per_pair > limit] == []
    assert sum(u.per_pair for u in used) <= 160


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter does not compile")
def test_a_wait_behind_the_end_of_a_kernel_is_no_loop(monkeypatch):
    """For sm_100 it jumps back into a loop; the shortest such jump once passed for a loop of half the instructions."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import triton_aot

    assert triton_aot.compile_kernel("query", "polar", 64, "bf16", 100).per_pair > 60


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
