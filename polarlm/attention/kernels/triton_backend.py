"""Launching the Triton kernels: block sizes, operators that torch.compile sees as one node, and what they cannot do.

Needs a CUDA device, or TRITON_INTERPRET=1 in the environment before the first import (slow, for tests). Triton itself
is imported at the first launch.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from .lag_tables import KAPPA, directional_tables, radial_tables
from .noise import MAX_QUERY_PRECISION, MIN_MAGNITUDE, AttentionOutput, DirectionalNoise, RadialNoise
from .streaming_radial import radial_forward

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_SIZE = 128  # largest head (real channels) with block sizes that were checked for spills

# (queries per block, keys per block, warps, stages) by kernel, for head sizes up to 64 and up to 128, bf16 and fp32.
# benchmarks/triton_aot.py compiles these for sm_80 and sm_90: no spills, and shared memory below 99 KB (any GPU).
LAUNCH = {
    "forward": {(64, 2): (64, 64, 4, 2), (128, 2): (64, 64, 4, 2), (64, 4): (64, 32, 4, 2), (128, 4): (64, 32, 8, 2)},
    "query": {(64, 2): (64, 64, 4, 2), (128, 2): (64, 64, 8, 2), (64, 4): (64, 32, 4, 2), (128, 4): (64, 32, 8, 1)},
    "key": {(64, 2): (32, 64, 4, 2), (128, 2): (32, 64, 8, 2), (64, 4): (32, 64, 8, 2), (128, 4): (32, 32, 8, 1)},
    "lag": {(64, 2): (32, 32, 4, 2), (128, 2): (32, 32, 4, 2), (64, 4): (32, 32, 4, 2), (128, 4): (32, 32, 4, 1)},
}


def triton_obstacle(q: Tensor, dropout: float, radial_mode: str) -> str | None:
    """Why the Triton kernels cannot do this call, or None."""
    if not INSTALLED:
        return "triton is not installed (pip install 'polarlm[kernels]')"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors and these are on {q.device.type} (TRITON_INTERPRET=1 runs it slowly anywhere)"
    if q.dtype == torch.float64:
        return "it does not compute in float64"
    if q.shape[-1] > MAX_SIZE:
        return f"it takes heads of up to {MAX_SIZE} real channels and these have {q.shape[-1]}"
    if dropout > 0:
        return "it does not drop weights (dropout > 0)"
    if radial_mode == "shared":
        return "it never has the weights of all heads together, as block.radial=shared needs"
    return None


def launch_options(name: str, size: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Block sizes of a kernel, and its number of warps and pipeline stages."""
    key = (64 if size <= 64 else 128, element_size)
    block_q, block_k, warps, stages = LAUNCH[name][key]
    block_d = max(16, 1 << (size - 1).bit_length())
    return dict(BLOCK_D=block_d, BLOCK_Q=block_q, BLOCK_K=block_k), dict(num_warps=warps, num_stages=stages)


class _Call:
    """The arguments that all four kernels share."""

    def __init__(self, q, k, v, m2, log_tables, shape, documents, kernel, decay_keys, decay_values) -> None:
        from . import triton_kernels, triton_tiles

        self.kernels = triton_kernels
        self.batch, self.heads, self.queries, self.size = q.shape
        self.groups, self.keys = k.shape[1:3]
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.q2, self.k2 = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square() for x in (q, k))
        pad = triton_tiles.PAD.value
        tables = torch.nn.functional.pad(log_tables, (pad, pad))
        tables[KAPPA, :, :pad] = tables[KAPPA, :, -pad:] = -torch.inf
        tables[KAPPA] *= triton_tiles.LOG2E.value
        tables[1:] = tables[1:].exp()
        self.pointers = (
            self.q, self.k, self.v, self.q2.contiguous(), self.k2.contiguous(), None if m2 is None else m2.contiguous(),
            None if documents is None else documents.contiguous(), tables, shape.contiguous(),
        )  # fmt: skip
        cap = MAX_QUERY_PRECISION / (self.size / 2)
        strides = (stride for x in (self.q, self.k, self.v) for stride in x.stride()[:3])
        self.numbers = (*strides, self.heads, self.queries, self.keys, tables.shape[-1], cap)
        precise = "tf32x3" if q.dtype == torch.float32 else "tf32"  # three tf32 products carry 21 of fp32's 24 bits
        self.switches = dict(
            GROUP=self.heads // self.groups, SIZE=self.size, KERNEL=kernel, MAGNITUDE=m2 is not None,
            DECAY_KEYS=decay_keys, DECAY_VALUES=decay_values, DOCUMENTS=documents is not None,
            PRECISION="interpreted" if INTERPRETED else precise,
        )  # fmt: skip

    def launch(self, name: str, *extra) -> None:
        blocks, options = launch_options(name, self.size, self.q.element_size())
        programs = {
            "forward": -(-self.queries // blocks["BLOCK_Q"]) * self.heads,
            "query": -(-self.queries // blocks["BLOCK_Q"]) * self.heads,
            "key": -(-self.keys // blocks["BLOCK_K"]) * self.groups,
            "lag": -(-self.keys // blocks["BLOCK_K"]) * self.heads,
        }[name] * self.batch
        run = getattr(self.kernels, f"{name}_kernel")
        run[(programs,)](*self.pointers, *extra, *self.numbers, **self.switches, **blocks, **options)

    def lag_sums(self, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Sums along equal lags (rows, H, S) of g, the parts of log n (or −∂log κ̃) and ∂log E; and ∂ν or ∂τ (H,)."""
        block = launch_options("lag", self.size, self.q.element_size())[0]["BLOCK_K"]
        diagonals = -(-self.keys // block)
        rows = 2 + self.switches["MAGNITUDE"] + (self.switches["DECAY_KEYS"] or self.switches["DECAY_VALUES"])
        sums = self.q2.new_empty(rows, self.batch, self.heads, diagonals, 2, block)
        d_shape = self.q2.new_empty(self.batch, self.heads, diagonals)
        self.launch("lag", *upstream, sums, d_shape, d_shape.numel())
        # The second half of a diagonal has the lags of the diagonal before it.
        at_lag = sums[..., 0, :].clone()
        at_lag[..., :-1, :] += sums[..., 1:, 1, :]
        return at_lag.sum(1).flatten(-2)[..., : self.keys], d_shape.sum((0, 2))


@torch.library.custom_op("polarlm::triton_forward", mutates_args=())
def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, log_tables: Tensor, shape: Tensor, documents: Tensor | None,
    kernel: str, decay_keys: bool, decay_values: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh) and log-evidence (B,H,T); `shape` (H,) is ν or τ, `m2` (B,S) the squared magnitude."""
    call = _Call(q, k, v, m2, log_tables, shape, documents, kernel, decay_keys, decay_values)
    out, log_evidence = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(call.q2)
    call.launch("forward", out, log_evidence)
    return out, log_evidence


@triton_forward.register_fake
def _(q, k, v, m2, log_tables, shape, documents, kernel, decay_keys, decay_values):
    return torch.empty_like(q, memory_format=torch.contiguous_format), shape.new_empty(q.shape[:3])


@torch.library.custom_op("polarlm::triton_backward", mutates_args=())
def triton_backward(
    d_out: Tensor, d_log_evidence: Tensor, out: Tensor, log_evidence: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, log_tables: Tensor, shape: Tensor, documents: Tensor | None,
    kernel: str, decay_keys: bool, decay_values: bool, noise_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, m2, the log-tables and `shape`; the last two stay zero unless `noise_learns`."""
    call = _Call(q, k, v, m2, log_tables, shape, documents, kernel, decay_keys, decay_values)
    d_out = d_out.contiguous()
    delta = torch.linalg.vecdot(d_out.float(), out.float()) - d_log_evidence  # Σ_j A ∂A − ∂ log-evidence
    upstream = (d_out, log_evidence, delta)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if kernel == "gaussian":
        dq.zero_()
    else:
        call.launch("query", *upstream, dq)
    per_group = None if m2 is None else m2.new_empty(call.batch, call.groups, call.keys)
    call.launch("key", *upstream, dk, dv, per_group)
    d_m2 = q.new_empty(0) if per_group is None else per_group.sum(1)
    d_tables, d_shape = torch.zeros_like(log_tables), torch.zeros_like(shape)
    if noise_learns:
        sums, d_shape = call.lag_sums(*upstream)
        if m2 is None:
            d_tables = torch.cat([sums[:1], -sums[1:2], sums[2:]])
        else:
            own, floor = sums[1:2], sums[2:3]
            d_tables = torch.cat([sums[:1], own + floor - sums[:1], own, floor, sums[3:]])
    return dq, dk, dv, d_m2, d_tables, d_shape


@triton_backward.register_fake
def _(d_out, d_log_evidence, out, log_evidence, q, k, v, m2, log_tables, shape, *_options):
    contiguous = torch.contiguous_format
    inputs = (q, k, v, m2, log_tables, shape)
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in inputs)


def _save(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx, d_out: Tensor, d_log_evidence: Tensor):
    noise_learns = any(ctx.needs_input_grad[4:6])
    found = triton_backward(d_out, d_log_evidence, *ctx.saved_tensors, *ctx.options, noise_learns)
    inputs = ctx.saved_tensors[2:8]
    return *(None if x is None else g for x, g in zip(inputs, found)), None, *[None] * len(ctx.options)


triton_forward.register_autograd(_differentiate, setup_context=_save)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    *,
    kernel: str,
    decay_keys: bool,
    decay_values: bool,
    radial: RadialNoise | None,
    radial_mode: str,
    documents: Tensor | None,
    dropout: float,
) -> AttentionOutput:
    """Robust attention by the Triton kernels; arguments as in `robust_attention`, limits in `triton_obstacle`.

    bf16 tensors are multiplied as they are and scored in fp32, anything else is taken as fp32. The radial channel
    `own` needs ⟨v_i, v_j⟩ over all heads at once and runs through the streaming operator.
    """
    same = torch.bfloat16 if q.dtype == k.dtype == v.dtype == torch.bfloat16 else torch.float32
    decay_keys = decay_keys and kernel != "gaussian"  # the Gaussian kernel does not look at the residual
    m = None if magnitude is None else magnitude.float()
    m2 = None if m is None else m.clamp_min(MIN_MAGNITUDE).square()
    decays = decay_keys or decay_values
    tables = directional_tables(noise, k.shape[2], q.shape[3] / 2, m is not None, decays, torch.float32)
    shape = {"student": noise.nu, "exponential": noise.tau, "gaussian": torch.ones_like(noise.mu)}[kernel].float()
    v_bar, log_evidence = triton_forward(
        *(x.to(same) for x in (q, k, v)), m2, tables, shape, documents, kernel, decay_keys, decay_values
    )
    m_bar = None
    if radial_mode == "own":
        value, rows = v.float().transpose(1, 2).flatten(2), radial_tables(radial, k.shape[2], torch.float32)
        m_bar, _ = radial_forward(value, m, rows, radial.nu.float(), documents, q.shape[2])
    return AttentionOutput(v_bar.to(v.dtype), log_evidence, m_bar)
