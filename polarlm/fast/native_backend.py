"""Robust attention by the native kernels (native/): one call per pass, all cores, O(N) memory, float32 and float64."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.attention.robust.call import (
    KERNELS,
    NOISE_ROWS,
    RADIAL_CORRELATIONS,
    RADIAL_MODES,
    RADIAL_ROWS,
    AttentionOutput,
    RobustCall,
)
from polarlm.geometry.precision import MAX_QUERY_PRECISION, MIN_MAGNITUDE

from .build import NotBuilt, library
from .operator import dense_channels, differentiable, operator

DIFFERENTIABLE = ("q", "k", "v", "m", "forgotten", "noise", "radial_noise")
# Of struct Call: what is computed, in numbers.
SWITCHES = ("kernel", "decay_keys", "decay_values", "dot_form", "radial", "correlation")
OUTPUTS = ("out", "evidence", "sums", "shifts", "m_bar", "radial_evidence", "head_m_bar")
BLOCK = 64  # queries of a task, as in native/call.h
# Multiply-adds of q·k per call below which waking other threads costs more than they help.
WORTH_SHARING = 2**20
VECTOR_BYTES = 64  # channels come in multiples of the widest vector; narrower machines divide it


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class Call(ctypes.Structure):
    """`struct Call` of native/call.h, which numbers kernels, radial modes and rows in the order of their names."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in (
            "batch", "heads", "groups", "queries", "keys", "size", *SWITCHES,
            "parts", "threads", "seed", "learns_shape", "forgotten_row",
        )],
        *[(name, ctypes.c_double) for name in ("half", "dropout", "cap", "least_magnitude")],
        *[(name, Strides) for name in ("q_at", "k_at", "v_at", "out_at", "d_out_at", "dq_at")],
        *[(name, ctypes.c_void_p) for name in (
            "q", "k", "v", "magnitude", "documents", "forgotten", "noise", "radial_noise", *OUTPUTS,
            "d_out", "d_evidence", "d_m_bar", "dq", "dk", "dv", "d_magnitude", "d_forgotten", "d_noise", "d_radial",
        )],
    ]  # fmt: skip

    def point(self, **tensors: Tensor | None) -> None:
        """Fill in addresses, and strides where the kernels ask for them."""
        for name, x in tensors.items():
            setattr(self, name, address(x))
            if x is not None and hasattr(self, f"{name}_at"):
                setattr(self, f"{name}_at", Strides(*x.stride()[:3]))


def address(x: Tensor | None) -> int | None:
    """Where a tensor's numbers lie."""
    return None if x is None else x.data_ptr()


def switches_of(call: Any) -> list[int]:
    """The SWITCHES of a RobustCall, or of a Recipe (native_decode.py), which has the same names for them."""
    decay_keys = call.decay_keys and call.kernel != "gaussian"
    words = (decay_keys, call.decay_values, call.residual_form == "dot")
    modes = RADIAL_MODES.index(call.radial_mode), RADIAL_CORRELATIONS.index(call.radial_correlation)
    return [KERNELS.index(call.kernel), *map(int, words), *modes]


def native_obstacle(call: RobustCall) -> str | None:
    """Why the native kernels cannot take a call, or None."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU and these tensors are on {call.q.device.type}"
    if call.only_plain is not None:
        return call.only_plain
    return unbuilt(call.score_dtype)


@torch.compiler.assume_constant_result
def unbuilt(dtype: torch.dtype) -> str | None:
    """Why the kernels for this precision could not be compiled, or None."""
    try:
        library(_real(dtype))
    except NotBuilt as reason:
        return str(reason)
    return None


def native_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention by the native kernels."""
    dtype, size = call.score_dtype, call.q.shape[3]
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    padding = -size % (VECTOR_BYTES // dtype.itemsize)
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    m = None if call.magnitude is None else call.magnitude.to(dtype)
    forgotten = None if call.forgotten is None else call.forgotten.to(dtype)
    radial = call.radial.rows(torch.float64) if call.radial_mode != "off" and call.radial is not None else None
    # Drawn by torch's generator, read by both passes.
    seed = torch.randint(2**62, (1,)) if call.dropout else None
    out, log_evidence, _, _, m_bar, *_ = native_forward(
        q, k, v, m, forgotten, call.noise.rows(call.kernel, torch.float64), radial, call.documents, seed,
        switches_of(call), size / 2, call.dropout, call.noise.shape(call.kernel).requires_grad,
    )  # fmt: skip
    v_bar = out[..., :size] if padding else out
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar if radial is not None else None)


def _describe(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, forgotten: Tensor | None, noise: Tensor,
    radial_noise: Tensor | None, documents: Tensor | None, seed: Tensor | None, switches: Sequence[int], half: float,
    dropout: float, learns_shape: bool,
) -> tuple[Call, tuple[Tensor | None, ...]]:  # fmt: skip
    """The call as the kernels take it, and the tensors that must live as long."""
    (batch, heads, queries, size), (groups, keys) = q.shape, k.shape[1:3]
    q, k, v = (dense_channels(x) for x in (q, k, v))
    if documents is not None:  # padded: the last queries are read in whole vectors
        documents = F.pad(documents.to(torch.int64 if q.dtype == torch.float64 else torch.int32).flatten(), (0, 64))
    m, forgotten, radial_noise = (None if x is None else x.contiguous() for x in (m, forgotten, radial_noise))
    noise = noise.contiguous()
    threads = torch.get_num_threads() if batch * heads * queries * keys * size >= WORTH_SHARING else 1
    call = Call(
        batch, heads, groups, queries, keys, size, *switches,
        1, threads, 0 if seed is None else int(seed), learns_shape, keys,
        half, dropout, MAX_QUERY_PRECISION, MIN_MAGNITUDE,
    )  # fmt: skip
    tensors = dict(magnitude=m, documents=documents, forgotten=forgotten, noise=noise, radial_noise=radial_noise)
    call.point(q=q, k=k, v=v, **tensors)
    return call, (q, k, v, *tensors.values())


def _gradient(
    gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...], given: dict[str, Any], wanted: set[str]
) -> dict[str, Tensor]:
    d_out, d_evidence, _, _, d_m_bar, *_ = gradients
    results = native_backward(d_out, d_evidence, d_m_bar, *outputs, *given.values())
    return dict(zip(DIFFERENTIABLE, results))


@differentiable("polarlm::native_forward", _gradient)
def native_forward(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, forgotten: Tensor | None, noise: Tensor,
    radial_noise: Tensor | None, documents: Tensor | None, seed: Tensor | None, switches: Sequence[int], half: float,
    dropout: float, learns_shape: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """OUTPUTS: v_bar (B,H,T,Dh), log-evidence (B,H,T), m_bar (B,T), the others for the backward pass."""
    call, _alive = _describe(
        q, k, v, m, forgotten, noise, radial_noise, documents, seed, switches, half, dropout, learns_shape
    )
    outputs = _outputs(q, switches)
    call.point(**dict(zip(OUTPUTS, outputs)))
    library(_real(q.dtype)).polarlm_forward(ctypes.byref(call), parallel())
    return outputs  # type: ignore[return-value]  # the schema wants them counted


def _outputs(q: Tensor, switches: Sequence[int]) -> tuple[Tensor, ...]:
    (batch, heads, queries, size), radial = q.shape, RADIAL_MODES[switches[SWITCHES.index("radial")]]
    out = q.new_empty(batch, queries, heads, size).transpose(1, 2)  # as the projection behind it wants it
    per_head, per_token = (batch, heads, queries), (batch, queries) if radial != "off" else (0,)
    shapes = [per_head] * 3 + [per_token] * 2 + [per_head if radial == "shared" else (0,)]
    return out, *(q.new_empty(shape) for shape in shapes)


@native_forward.traced.register_fake
def _(q, k, v, m, forgotten, noise, radial_noise, documents, seed, switches, *_options):
    return _outputs(q, switches)


@operator("polarlm::native_backward")
def native_backward(
    d_out: Tensor, d_evidence: Tensor, d_m_bar: Tensor,
    out: Tensor, evidence: Tensor, sums: Tensor, shifts: Tensor, m_bar: Tensor, radial_evidence: Tensor,
    head_m_bar: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, forgotten: Tensor | None, noise: Tensor,
    radial_noise: Tensor | None, documents: Tensor | None, seed: Tensor | None, switches: Sequence[int], half: float,
    dropout: float, learns_shape: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of DIFFERENTIABLE; empty where there is no such input."""
    call, _alive = _describe(
        q, k, v, m, forgotten, noise, radial_noise, documents, seed, switches, half, dropout, learns_shape
    )
    units = call.batch * (call.groups if RADIAL_MODES[call.radial] == "off" else 1)
    if units < 4 * call.threads and units % call.threads:
        # Few units would leave threads idle: the query blocks of each are dealt out, every part with its own sums.
        call.parts = min(-(-call.queries // BLOCK), -(-2 * call.threads // units))
    d_out, d_evidence, d_m_bar = dense_channels(d_out), d_evidence.contiguous(), d_m_bar.contiguous()
    dq = torch.zeros_like(out)
    dk, dv = (q.new_zeros(call.parts, *k.shape) for _ in range(2))
    d_m = q.new_zeros((call.parts, call.batch, units // call.batch, call.keys) if m is not None else 0)
    d_forgotten = q.new_zeros((call.parts, *q.shape[:2], call.keys) if forgotten is not None else 0)
    d_noise = noise.new_zeros(call.parts, call.batch, call.heads, len(NOISE_ROWS))
    d_radial = noise.new_zeros(call.parts, call.batch, len(RADIAL_ROWS))
    call.point(
        **dict(zip(OUTPUTS, (out, evidence, sums, shifts, m_bar, radial_evidence, head_m_bar))),
        d_out=d_out, d_evidence=d_evidence, d_m_bar=d_m_bar,
        dq=dq, dk=dk, dv=dv, d_magnitude=d_m, d_forgotten=d_forgotten, d_noise=d_noise, d_radial=d_radial,
    )  # fmt: skip
    library(_real(q.dtype)).polarlm_backward(ctypes.byref(call), parallel())
    dk, dv = (x[0] if call.parts == 1 else x.sum(0) for x in (dk, dv))
    d_m = d_m.sum((0, 2)) if m is not None else d_m
    if forgotten is not None:
        d_forgotten = d_forgotten.sum(0)
        d_forgotten[..., -call.queries :] += d_evidence  # Σ_j ∂L of a query is that of its evidence
    d_radial = d_radial.sum((0, 1)) if radial_noise is not None else d_radial.new_empty(0)
    return dq, dk, dv, d_m, d_forgotten, d_noise.sum((0, 1)).T.contiguous(), d_radial


@native_backward.traced.register_fake
def _(d_out, d_evidence, d_m_bar, out, evidence, sums, shifts, m_bar, radial_evidence, head_m_bar, q, k, v, m,
      forgotten, noise, radial_noise, *_options):  # fmt: skip
    kinds = (k, v, m, forgotten, noise, radial_noise)
    made = (q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in kinds)
    return torch.empty_like(out), *made


def _real(dtype: torch.dtype) -> str:
    return "double" if dtype == torch.float64 else "float"


@functools.cache
def parallel() -> ctypes.c_void_p:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself uses, so that both share one set of threads."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return ctypes.cast(ctypes.CDLL(str(folder / name)).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return ctypes.c_void_p(None)  # one thread
