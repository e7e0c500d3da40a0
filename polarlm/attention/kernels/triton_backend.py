"""Launching the Triton kernels: block sizes, operators that torch.compile sees as one node, and what they cannot do.

Needs a CUDA device, or TRITON_INTERPRET=1 in the environment before the first import (slow, for tests). Triton itself
is imported at the first launch.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from polarlm.geometry.precision import MIN_MAGNITUDE

from .call import AttentionOutput, RobustCall
from .noise import NOISE_ROWS
from .operator import differentiable, operator
from .streaming import streaming_radial

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What the operator differentiates, in the order in which its backward pass returns the gradients.
DIFFERENTIABLE = ("q", "k", "v", "m2", "parameters")
MAX_SIZE = 128  # largest head (real channels) with block sizes that were checked for spills

# (queries per block, keys per block, warps, stages) by kernel, for heads of up to 64 and 128 channels of 2 and 4 bytes.
# Chosen with benchmarks/triton_aot.py: at most 32 bytes of spills (mostly none) on sm_80, sm_90 and sm_100, and shared
# memory for any GPU from Ampere on. Speed on a GPU had no say: docs/triton.md.
LAUNCH = {
    "forward": {(64, 2): (64, 32, 4, 2), (128, 2): (64, 32, 8, 2), (64, 4): (32, 16, 4, 2), (128, 4): (16, 32, 4, 1)},
    "query": {(64, 2): (32, 64, 8, 2), (128, 2): (32, 64, 8, 2), (64, 4): (16, 32, 8, 2), (128, 4): (16, 32, 8, 1)},
    "key": {(64, 2): (64, 32, 8, 2), (128, 2): (64, 32, 8, 2), (64, 4): (32, 16, 4, 1), (128, 4): (32, 16, 8, 1)},
}


def triton_obstacle(call: RobustCall) -> str | None:
    """Why the Triton kernels cannot do this call, or None."""
    if call.return_weights:
        return "it never holds the weights that were asked for"
    if call.only_plain is not None:
        return call.only_plain
    if call.residual_form == "dot":
        return "it only knows block.residual_form=full"
    if not call.bounded:
        return "without a noise floor (sigma_t0 = 0) precision grows with the lag beyond what its fp32 products hold"
    if not INSTALLED:
        return "triton is not installed (pip install 'polarlm[kernels]')"
    if call.q.device.type != "cuda" and not INTERPRETED:
        where = call.q.device.type
        return f"it needs CUDA tensors and these are on {where} (TRITON_INTERPRET=1 runs it slowly anywhere)"
    if call.q.dtype == torch.float64:
        return "it does not compute in float64"
    if call.q.shape[-1] > MAX_SIZE:
        return f"it takes heads of up to {MAX_SIZE} real channels and these have {call.q.shape[-1]}"
    if call.dropout > 0:
        return "it does not drop weights (dropout > 0)"
    if call.radial_mode == "shared":
        return "it never has the weights of all heads together, as block.radial=shared needs"
    return None


class _Call:
    """The arguments that the three kernels share."""

    def __init__(self, q, k, v, m2, parameters, documents, kernel, decay_keys, decay_values, shape_learns) -> None:
        from . import triton_kernels, triton_tiles

        self.kernels, self.tiles = triton_kernels, triton_tiles
        self.batch, self.heads, self.queries, size = q.shape
        self.groups, self.keys = k.shape[1:3]
        self.sizes = (64 if size <= 64 else 128, q.element_size())
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        q2, k2 = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square().contiguous() for x in (q, k))
        m2 = None if m2 is None else m2.contiguous()
        documents = None if documents is None else documents.to(torch.int32).contiguous()
        strides = (stride for x in (q, k, v) for stride in x.stride()[:3])
        tensors = (q, k, v, q2, k2, m2, documents, parameters.contiguous())
        self.inputs = triton_tiles.Inputs._make((*tensors, *strides, self.heads, self.queries, self.keys))
        precise = "tf32x3" if q.dtype == torch.float32 else "tf32"  # three tf32 products carry 21 of fp32's 24 bits
        self.switches: dict[str, Any] = dict(
            kernel=kernel, decay_keys=decay_keys, decay_values=decay_values, shape_learns=shape_learns,
            precision="interpreted" if INTERPRETED else precise, group=self.heads // self.groups,
            size=size, block_d=max(16, 1 << (size - 1).bit_length()),
        )  # fmt: skip

    def launch(self, name: str, *extra: Tensor | None, **learns: Any) -> None:
        block_q, block_k, warps, stages = LAUNCH[name][self.sizes]
        switches = self.tiles.Switches(**self.switches, block_q=block_q, block_k=block_k, **learns)
        programs = self.batch * self.blocks(name) * (self.groups if name == "key" else self.heads)
        run = getattr(self.kernels, f"{name}_kernel")
        run[(programs,)](self.inputs, *extra, switches, num_warps=warps, num_stages=stages)

    def blocks(self, name: str) -> int:
        block_q, block_k, _, _ = LAUNCH[name][self.sizes]
        return -(-self.keys // block_k) if name == "key" else -(-self.queries // block_q)


def _gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    results = triton_backward(*gradients, *outputs, *given.values(), "parameters" in wanted)
    return dict(zip(DIFFERENTIABLE, results))


@differentiable("polarlm::triton_forward", _gradient)
def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, parameters: Tensor, documents: Tensor | None,
    kernel: str, decay_keys: bool, decay_values: bool, shape_learns: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh) and log-evidence (B,H,T); `parameters` (7,H) are the NOISE_ROWS, `m2` (B,S) is m²."""
    call = _Call(q, k, v, m2, parameters, documents, kernel, decay_keys, decay_values, shape_learns)
    out, log_evidence = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(call.inputs.q2)
    call.launch("forward", None if m2 is None else m2.amax(1), out, log_evidence)
    return out, log_evidence


@triton_forward.traced.register_fake
def _(q, k, v, m2, parameters, *_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), parameters.new_empty(q.shape[:3])


@operator("polarlm::triton_backward")
def triton_backward(
    d_out: Tensor, d_log_evidence: Tensor, out: Tensor, log_evidence: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, parameters: Tensor, documents: Tensor | None,
    kernel: str, decay_keys: bool, decay_values: bool, shape_learns: bool, noise_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, m2 (empty without it) and the parameters (zero unless `noise_learns`)."""
    call = _Call(q, k, v, m2, parameters, documents, kernel, decay_keys, decay_values, shape_learns)
    d_out = d_out.contiguous()
    delta = torch.linalg.vecdot(d_out.float(), out.float()) - d_log_evidence  # Σ_j A ∂A − ∂ log-evidence
    upstream = (d_out, log_evidence, delta)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    shares = parameters.new_empty(call.batch, call.heads, call.blocks("query"), len(NOISE_ROWS))
    if kernel == "gaussian" and not noise_learns:
        dq.zero_()
    else:
        call.launch("query", *upstream, dq, shares, noise_learns=noise_learns)
    per_group = None if m2 is None else m2.new_empty(call.batch, call.groups, call.keys)
    call.launch("key", *upstream, dk, dv, per_group)
    d_m2 = q.new_empty(0) if per_group is None else per_group.sum(1)
    d_parameters = shares.sum((0, 2)).T.contiguous() if noise_learns else torch.zeros_like(parameters)
    return dq, dk, dv, d_m2, d_parameters


@triton_backward.traced.register_fake
def _(d_out, d_log_evidence, out, log_evidence, q, k, v, m2, parameters, *_options):
    contiguous = torch.contiguous_format
    inputs = (q, k, v, m2, parameters)
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in inputs)


def triton_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention by the Triton kernels; limits in `triton_obstacle`.

    bf16 tensors are multiplied as they are and scored in fp32, anything else is taken as fp32. The radial channel
    `own` needs ⟨v_i, v_j⟩ over all heads at once and runs in plain torch.
    """
    qkv = (call.q, call.k, call.v)
    same = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in qkv) else torch.float32
    m2 = None if call.magnitude is None else call.magnitude.float().clamp_min(MIN_MAGNITUDE).square()
    v_bar, log_evidence = triton_forward(
        *(x.to(same) for x in qkv),
        m2,
        call.noise.rows(call.kernel, torch.float32),
        call.documents,
        call.kernel,
        call.decay_keys and call.kernel != "gaussian",  # the Gaussian kernel does not look at the residual
        call.decay_values,
        call.kernel != "gaussian" and call.noise.shape(call.kernel).requires_grad,
    )
    m_bar = streaming_radial(call) if call.radial_mode == "own" else None
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar)
