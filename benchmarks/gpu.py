"""(e) The Triton kernels on a GPU: forward and backward against scaled_dot_product_attention and against streaming.

    python -m benchmarks.gpu [--batch 8] [--heads 12] [--head-dim 64] [--dtype bf16]

Not run by `make bench`; no number from a GPU has been published yet.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.timing import table
from polarlm.attention.kernels import DirectionalNoise, RobustCall, robust_attention


def _milliseconds(run, repeat: int = 20) -> float:
    for _ in range(5):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device, and torch sees none here.")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    rows = []
    for context in (512, 1024, 2048, 4096, 8192):
        shape = (options.batch, options.heads, context, options.head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        m = (torch.rand(shape[0], context, device="cuda") + 0.5).requires_grad_()
        values = dict(mu=0.01, eta_k2=0.05, eta_q2=0.05, sigma02=0.02, m_inf2=0.01, nu=4.0)
        noise = DirectionalNoise(
            **{name: torch.full(shape[1:2], x, device="cuda").requires_grad_() for name, x in values.items()}
        )

        def sdpa(q=q, k=k, v=v) -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        frozen = replace(noise, nu=torch.full(shape[1:2], 3.0, device="cuda"))  # weights by squaring

        def robust(backend: str, noise=noise, q=q, k=k, v=v, m=m) -> None:
            out = robust_attention(RobustCall(q, k, v, noise, "student", m), backend)
            (out.v_bar.float().sum() + out.log_evidence.sum()).backward()

        base = _milliseconds(sdpa)
        for name, run in (
            ("sdpa", sdpa),
            ("triton", lambda: robust("triton")),
            ("triton, ν = 3 frozen", lambda frozen=frozen: robust("triton", frozen)),
            ("streaming", lambda: robust("streaming")),
        ):
            torch.cuda.reset_peak_memory_stats()
            spent = _milliseconds(run)
            peak = torch.cuda.max_memory_allocated() / 2**20
            rows.append({"attention": name, "context": context, "ms": spent, "ratio": spent / base, "MB": peak})
    print(torch.cuda.get_device_name())
    print(table(rows, ["attention", "context", "ms", "ratio", "MB"]))


if __name__ == "__main__":
    main()
