"""The Triton backend: right in the interpreter, compiles without spills, right on a GPU where there is one."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, assert_same, make_case, run

from polarlm.attention.kernels import triton_backend
from polarlm.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
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


@needs_triton
@pytest.mark.parametrize(
    ("size", "dtype", "sm"),
    [
        (64, "bf16", 80),
        *(
            pytest.param(size, dtype, sm, marks=pytest.mark.slow)
            for size, dtype, sm in (
                (64, "bf16", 90),
                (64, "bf16", 100),
                (64, "fp32", 80),
                (128, "bf16", 80),
                (128, "fp32", 80),
            )
        ),
    ],
)
@pytest.mark.parametrize("kernel", list(triton_backend.LAUNCH))
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="the interpreter does not compile")
def test_shipped_block_sizes_compile_without_spills(monkeypatch, kernel, size, dtype, sm):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.triton_aot import VARIANTS, compile_kernel

    for variant in VARIANTS:
        used = compile_kernel(kernel, variant, size, dtype, sm)
        assert used.spills == 0, variant
        assert used.shared <= 99 * 1024  # what a block may have on any GPU from Ampere on


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(decay_keys=True, decay_values=True)])
def test_on_a_gpu(dtype, options):
    case = _on_gpu(make_case(queries=257, size=64, process=bool(options), dtype=dtype))
    assert_same(case, "triton", 1e-3 if dtype == torch.float32 else 3e-2, kernel="student", **options)
    first, second = (run(case, "triton", kernel="student", **options)[1] for _ in range(2))
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), f"{name} differs between two runs"


def _on_gpu(case: Case) -> Case:
    def moved(x):
        if dataclasses.is_dataclass(x):
            return type(x)(**{name: moved(value) for name, value in vars(x).items()})
        return None if x is None else x.detach().cuda().requires_grad_()

    return moved(case)
