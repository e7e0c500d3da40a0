"""Launching the Triton kernels: block sizes, operators that torch.compile sees as one node, and what they cannot do.

Needs a CUDA device, or TRITON_INTERPRET=1 in the environment before the first import (slow, for tests). Triton itself
is imported at the first launch.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.attention.robust.call import NOISE_ROWS, RADIAL_ROWS, AttentionOutput, RobustCall
from polarlm.geometry.precision import MIN_MAGNITUDE

from .native_backend import dense_channels, differentiable, operator

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What the operator differentiates, in the order in which its backward pass returns the gradients.
DIFFERENTIABLE = ("q", "k", "v", "m2", "forgotten", "parameters")
MAX_SIZE = 128  # largest head (real channels) with block sizes that were checked for spills

# (queries per block, keys per block, warps, stages) by kernel, for heads of up to 64 and 128 channels of 2 and 4 bytes.
# Chosen with benchmarks/triton_aot.py: fewest instructions per pair, no spills in a loop of bf16 heads up to 64, shared
# memory for any GPU from Ampere on. A table and not a search when a run starts: other sizes add in another order, and a
# resumed run would not repeat bit by bit. Speed on a GPU had no say: docs/triton.md.
LAUNCH = {
    "forward": {(64, 2): (64, 32, 4, 2), (128, 2): (64, 32, 4, 2), (64, 4): (32, 16, 4, 2), (128, 4): (16, 32, 4, 1)},
    "query": {(64, 2): (64, 32, 4, 2), (128, 2): (64, 32, 4, 2), (64, 4): (16, 32, 4, 2), (128, 4): (16, 32, 8, 1)},
    "key": {(64, 2): (32, 64, 4, 2), (128, 2): (16, 64, 4, 2), (64, 4): (32, 16, 4, 1), (128, 4): (16, 16, 8, 2)},
    "radial": {(64, 2): (64, 64, 8, 2), (64, 4): (32, 32, 8, 1)},
    "radial_pairs": {(64, 2): (32, 64, 8, 2), (64, 4): (32, 32, 4, 2)},
}
# Instead of those that spill in a loop of bf16 heads up to 64: by kernel, matrix instructions (sm) and whether anything
# decays.
NARROWER = {
    ("query", 100, False): (64, 16, 4, 2), ("query", 100, True): (64, 16, 4, 2), ("key", 80, True): (16, 64, 4, 2)
}  # fmt: skip
CHANNELS = 64  # of all heads together, that the radial kernels multiply at a time
RADIAL_CHUNK = 256  # queries whose ∂c are kept at a time


def triton_obstacle(call: RobustCall) -> str | None:
    """Why the Triton kernels cannot do this call, or None."""
    if call.only_plain is not None:
        return call.only_plain
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
        return "it never has the weights of all heads together, as block/radial=shared needs"
    return None


def block_sizes(name: str, sizes: tuple[int, int], decays: bool, sm: int) -> tuple[int, int, int, int]:
    """Queries and keys per block, warps and stages of a kernel on a card of compute capability `sm`."""
    instructions = {9: 90, 10: 100, 11: 100}.get(sm // 10, 80)  # wgmma; tensor memory; mma, also on sm_120
    narrower = NARROWER.get((name, instructions, decays)) if sizes == (64, 2) else None
    return narrower or LAUNCH[name][sizes]


def _capability() -> int:
    if INTERPRETED:
        return 80
    from triton.runtime import driver

    return driver.active.get_current_target().arch


class _Launch:
    """Arguments that the kernels of one channel share, and the block sizes that `LAUNCH` has for them."""

    inputs: Any
    batch: int
    sizes: tuple[int, int]
    switches: dict[str, Any]

    def _switches(self, dtype: torch.dtype, **switches: Any) -> dict[str, Any]:
        precise = "tf32x3" if dtype == torch.float32 else "tf32"  # three tf32 products carry 21 of fp32's 24 bits
        return dict(precision="interpreted" if INTERPRETED else precise) | switches

    def launch(
        self, name: str, given: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...], **more: Any
    ) -> None:
        """Run a kernel that reads `given` beside the inputs, and writes every element of `results` once."""
        from . import triton_kernels, triton_radial, triton_tiles

        block_q, block_k, warps, stages = self.block_sizes(name)
        switches = triton_tiles.Switches(**self.switches, block_q=block_q, block_k=block_k, **more)
        run = getattr(triton_radial if name.startswith("radial") else triton_kernels, f"{name}_kernel")
        run[(self.programs(name),)](self.inputs, *given, *results, switches, num_warps=warps, num_stages=stages)

    def block_sizes(self, name: str) -> tuple[int, int, int, int]:
        """What this card takes for this call."""
        decays = self.switches["decay_keys"] or self.switches["decay_values"]
        return block_sizes(name, self.sizes, decays, _capability())

    def blocks(self, name: str) -> tuple[int, int]:
        """Of queries and of keys."""
        block_q, block_k, _, _ = self.block_sizes(name)
        return -(-self.inputs.queries // block_q), -(-self.inputs.keys // block_k)

    def programs(self, name: str) -> int:
        """How many there are."""
        raise NotImplementedError


class _Directional(_Launch):
    def __init__(
        self, q, k, v, q2, k2, m2, forgotten, parameters, documents,
        kernel, dot, constant, decay_keys, decay_values, shape_learns,
    ) -> None:  # fmt: skip
        from .triton_tiles import Inputs

        self.batch, self.heads, queries, size = q.shape
        self.groups, keys = k.shape[1:3]
        self.sizes = (64 if size <= 64 else 128, q.element_size())
        q, k, v = (dense_channels(x) for x in (q, k, v))
        strides = (stride for x in (q, k, v) for stride in x.stride()[:3])
        m2, forgotten = (x if x is None else x.contiguous() for x in (m2, forgotten))
        tensors = (q, k, v, q2, k2, m2, _whole(documents), forgotten, parameters.contiguous())
        self.inputs = Inputs._make((*tensors, *strides, self.heads, queries, keys))
        self.switches = self._switches(
            q.dtype, kernel=kernel, dot=dot, constant=constant, decay_keys=decay_keys, decay_values=decay_values,
            shape_learns=shape_learns,
            group=self.heads // self.groups, size=size, block_d=max(16, 1 << (size - 1).bit_length()),
        )  # fmt: skip

    def programs(self, name: str) -> int:
        queries, keys = self.blocks(name)
        return self.batch * (self.groups * keys if name == "key" else self.heads * queries)


class _Radial(_Launch):
    """Queries from `start` to `stop` of all of them, and the keys that they see."""

    def __init__(self, m, own, other, parameters, documents, queries: int, start: int, stop: int) -> None:
        from .triton_radial import Inputs

        self.batch, all_keys = m.shape
        seen = all_keys - queries + stop
        dtype = m.dtype if own is None else own.dtype
        self.sizes = (64, dtype.itemsize)
        own, other = (None, None) if own is None else (own[:, start:stop], other[:, :seen])
        strides = (0, 0, 0, 0) if own is None else (*own.stride()[:2], *other.stride()[:2])
        channels = 0 if own is None else own.shape[2]
        tensors = (own, other, m, documents, parameters)
        self.inputs = Inputs._make((*tensors, *strides, queries, all_keys, channels, stop - start, seen))
        self.switches = self._switches(
            dtype,
            kernel="student",
            decay_keys=False,
            decay_values=False,
            shape_learns=True,
            group=1,
            size=CHANNELS,
            block_d=CHANNELS,
        )

    def programs(self, name: str) -> int:
        queries, keys = self.blocks(name)
        return self.batch * queries * (keys if name == "radial_pairs" else 1)


def _whole(documents: Tensor | None) -> Tensor | None:
    return None if documents is None else documents.to(torch.int32).contiguous()


def _gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    """What needs no kernel of ours is outside of the operators: torch.compile joins it to what stands beside it."""
    (d_out, d_log_evidence, _, _), (out, *others) = gradients, outputs
    delta = (d_out.float() * out.float()).sum(-1) - d_log_evidence  # Σ_j A ∂A − ∂ log-evidence
    results = triton_backward(d_out, delta, *others, *given.values(), "parameters" in wanted)
    by_name = dict(zip(DIFFERENTIABLE, results))
    if given["m2"] is not None:
        by_name["m2"] = by_name["m2"].sum(1)
    if given["forgotten"] is not None:  # Σ_j ∂L of a query is that of its evidence
        cached = given["forgotten"].shape[2] - d_log_evidence.shape[2]
        by_name["forgotten"] = by_name["forgotten"] + F.pad(d_log_evidence, (cached, 0))
    return by_name


@differentiable("polarlm::triton_forward", _gradient)
def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, forgotten: Tensor | None, parameters: Tensor,
    documents: Tensor | None,
    kernel: str, dot: bool, constant: bool, decay_keys: bool, decay_values: bool, shape_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh) and log-evidence (B,H,T); ‖q‖² (B,H,T) and ‖k‖² (B,G,S) for the backward pass.

    `parameters` (7,H) are the NOISE_ROWS, `m2` (B,S) is m².
    """
    # In here, of q and k as they are stored: torch.compile would take them from before they are rounded to bf16.
    q2, k2 = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square().contiguous() for x in (q, k))
    options = (kernel, dot, constant, decay_keys, decay_values, shape_learns)
    call = _Directional(q, k, v, q2, k2, m2, forgotten, parameters, documents, *options)
    out, log_evidence = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(q2)
    largest = (None if m2 is None else m2.amax(1), k2.amax(2) if dot else None)
    call.launch("forward", largest, (out, log_evidence))
    return out, log_evidence, q2, k2


@triton_forward.traced.register_fake
def _(q, k, v, m2, forgotten, parameters, *_options):
    per_query, per_key = (parameters.new_empty(x.shape[:3]) for x in (q, k))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, per_query, torch.empty_like(per_query), per_key


@operator("polarlm::triton_backward")
def triton_backward(
    d_out: Tensor, delta: Tensor, log_evidence: Tensor, q2: Tensor, k2: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m2: Tensor | None, forgotten: Tensor | None, parameters: Tensor,
    documents: Tensor | None,
    kernel: str, dot: bool, constant: bool, decay_keys: bool, decay_values: bool, shape_learns: bool,
    noise_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, m2 per key head (B,G,S), forgotten and the parameters.

    Those of m2 and forgotten are empty without them, those of the parameters zero unless `noise_learns`.
    """
    options = (kernel, dot, constant, decay_keys, decay_values, shape_learns)
    call = _Directional(q, k, v, q2, k2, m2, forgotten, parameters, documents, *options)
    lowest, highest = log_evidence.aminmax(dim=2)
    given = (None if m2 is None else m2.amax(1), lowest, highest, d_out.contiguous(), log_evidence, delta.contiguous())
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    shares = parameters.new_empty(call.batch, call.heads, call.blocks("query")[0], len(NOISE_ROWS))
    if kernel == "gaussian" and not noise_learns:
        dq.zero_()
    else:
        call.launch("query", given, (dq, shares if noise_learns else None), noise_learns=noise_learns)
    d_m2 = None if m2 is None else m2.new_empty(call.batch, call.groups, k.shape[2])
    d_forgotten = None if forgotten is None else torch.empty_like(forgotten, memory_format=torch.contiguous_format)
    call.launch("key", given, (dk, dv, d_m2, d_forgotten))
    d_parameters = shares.sum((0, 2)).T.contiguous() if noise_learns else torch.zeros_like(parameters)
    d_m2, d_forgotten = (q.new_empty(0) if x is None else x for x in (d_m2, d_forgotten))
    return dq, dk, dv, d_m2, d_forgotten, d_parameters


@triton_backward.traced.register_fake
def _(d_out, delta, log_evidence, q2, k2, q, k, v, m2, forgotten, parameters, *_options):
    d_m2 = None if m2 is None else m2.new_empty(k.shape[:3])
    tensors = (q, k, v, d_m2, forgotten, parameters)
    contiguous = torch.contiguous_format
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in tensors)


def _radial_gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    results = triton_radial_backward(gradients[0], *outputs, *given.values())
    return dict(zip(("m", "own", "other", "parameters"), results))


@differentiable("polarlm::triton_radial", _radial_gradient)
def triton_radial(
    m: Tensor, own: Tensor | None, other: Tensor | None, parameters: Tensor, documents: Tensor | None, queries: int
) -> tuple[Tensor, Tensor]:
    """m_bar (B,T) and its log2-evidence, from m (B,S), rows whose products are the cosines, and the RADIAL_ROWS."""
    call = _Radial(m, own, other, parameters, _whole(documents), queries, 0, queries)
    m_bar, log2_evidence = m.new_empty(m.shape[0], queries), m.new_empty(m.shape[0], queries)
    call.launch("radial", (m.amax(1),), (m_bar, log2_evidence))
    return m_bar, log2_evidence


@triton_radial.traced.register_fake
def _(m, own, other, parameters, documents, queries):
    return m.new_empty(m.shape[0], queries), m.new_empty(m.shape[0], queries)


@operator("polarlm::triton_radial_backward")
def triton_radial_backward(
    d_m_bar: Tensor, m_bar: Tensor, evidence: Tensor,
    m: Tensor, own: Tensor | None, other: Tensor | None, parameters: Tensor, documents: Tensor | None, queries: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of m, own, other (empty without them) and the parameters.

    ∂c of RADIAL_CHUNK queries at a time is kept, for two matrix products of torch's.
    """
    documents, d_m_bar, d_m = _whole(documents), d_m_bar.contiguous(), torch.zeros_like(m)
    d_parameters: list[Tensor] = []
    d_own, d_other = (m.new_empty(0) if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (own, other))
    for start in range(0, queries, RADIAL_CHUNK):
        stop = min(start + RADIAL_CHUNK, queries)
        call = _Radial(m, own, other, parameters, documents, queries, start, stop)
        (query_blocks, key_blocks), seen = call.blocks("radial_pairs"), call.inputs.keys
        given = tuple(x[:, start:stop] for x in (evidence, m_bar, d_m_bar))
        d_cosine = None if own is None else own.new_empty(call.batch, stop - start, seen)
        by_query, by_key = (
            m.new_empty(call.batch, key_blocks, stop - start),
            m.new_empty(call.batch, query_blocks, seen),
        )
        shares = m.new_empty(call.batch, query_blocks, key_blocks, len(RADIAL_ROWS))
        call.launch("radial_pairs", given, (d_cosine, by_query, by_key, shares))
        if own is not None and other is not None and d_cosine is not None:
            d_own[:, start:stop] = d_cosine @ other[:, :seen]
            d_other[:, :seen] += d_cosine.mT @ own[:, start:stop]
        d_m[:, seen - (stop - start) : seen] += by_query.sum(1)
        d_m[:, :seen] += by_key.sum(1)
        d_parameters.append(shares.sum((0, 1, 2)))
    dtype = m.dtype if own is None else own.dtype
    return d_m, d_own.to(dtype), d_other.to(dtype), torch.stack(d_parameters).sum(0)


@triton_radial_backward.traced.register_fake
def _(d_m_bar, m_bar, evidence, m, own, other, parameters, *_options):
    return tuple(m.new_empty(0) if x is None else torch.empty_like(x) for x in (m, own, other, parameters))


def _correlated(call: RobustCall, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Rows (B,T,P) and (B,S,P), padded to whole blocks of channels, whose products are the c_ij of `call.cosine`."""
    if call.radial_correlation == "one":
        return None, None
    groups = call.k.shape[1]
    if call.radial_correlation == "vv":
        other = call.v.float().transpose(1, 2).flatten(2)
        own, other = other[:, -call.q.shape[2] :], other / other.shape[-1]
    else:  # Σ_h⟨q_h,k_h⟩ = Σ_g⟨Σ_h q_h, k_g⟩: query heads that share keys are added first
        q, k = (x.float().transpose(1, 2) for x in (call.q, call.k))
        group = q.shape[2] // groups
        norms = (x.flatten(2).norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k * group**0.5))
        own, other = (x.flatten(2) / n for x, n in zip((q.unflatten(2, (groups, group)).sum(3), k), norms))
    padding = -own.shape[-1] % CHANNELS
    own, other = (F.pad(x, (0, padding)).to(dtype) for x in (own, other))
    return own, other


def triton_radial_estimate(call: RobustCall, dtype: torch.dtype) -> Tensor:
    """m̄ (B,T) of a call whose radial weights are its own; `dtype` of the products."""
    assert call.radial is not None and call.magnitude is not None, "RobustCall.check sees to it"
    rows = (*_correlated(call, dtype), call.radial.rows(torch.float32))
    return triton_radial(call.magnitude.float().contiguous(), *rows, call.documents, call.q.shape[2])[0]


def triton_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention by the Triton kernels; limits in `triton_obstacle`.

    bf16 tensors are multiplied as they are and scored in fp32, anything else is taken as fp32. The radial channel
    `own` needs products over all heads at once, which are formed again (docs/triton.md).
    """
    qkv = (call.q, call.k, call.v)
    same = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in qkv) else torch.float32
    m2 = None if call.magnitude is None else call.magnitude.float().clamp_min(MIN_MAGNITUDE).square()
    v_bar, log_evidence, *_ = triton_forward(
        *(x.to(same) for x in qkv),
        m2,
        None if call.forgotten is None else call.forgotten.float(),
        call.noise.rows(call.kernel, torch.float32),
        call.documents,
        call.kernel,
        call.residual_form == "dot",
        call.constant,
        call.decay_keys and call.kernel != "gaussian",  # the Gaussian kernel does not look at the residual
        call.decay_values,
        call.kernel != "gaussian" and call.noise.shape(call.kernel).requires_grad,
    )
    m_bar = triton_radial_estimate(call, same) if call.radial_mode == "own" else None
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar)
