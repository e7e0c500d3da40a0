"""Robust attention by the native kernels (native/*.h): one call per pass, all cores, O(N) memory, float32 and float64."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.geometry.precision import MAX_QUERY_PRECISION, MIN_MAGNITUDE

from .build import NotBuilt, library
from .call import KERNELS, RADIAL_MODES, AttentionOutput, RobustCall
from .noise import NOISE_ROWS
from .operator import differentiable

# native/call.h numbers KERNELS, RADIAL_MODES, NOISE_ROWS and these in the order in which they are written.
RADIAL_ROWS = ("mu", "eta_k2", "eta_q2", "sigma02", "nu")
DIFFERENTIABLE = ("q", "k", "v", "m", "noise", "radial_noise")
BLOCK = 64  # queries of a task
# Multiply-adds per call below which waking other threads costs more than they help.
WORTH_SHARING = 2**19


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Call(ctypes.Structure):
    """`struct Call` of native/call.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in (
            "batch", "heads", "groups", "queries", "keys", "size",
            "kernel", "decay_keys", "decay_values", "dot_form", "radial", "from_queries",
            "parts", "threads", "seed", "learns_shape",
        )],
        *[(name, ctypes.c_double) for name in ("half", "dropout", "cap", "least_magnitude")],
        *[(name, _Strides) for name in ("q_at", "k_at", "v_at", "out_at", "d_out_at", "dq_at")],
        *[(name, ctypes.c_void_p) for name in (
            "q", "k", "v", "magnitude", "documents", "noise", "radial_noise",
            "out", "evidence", "m_bar", "radial_evidence", "head_m_bar",
            "d_out", "d_evidence", "d_m_bar", "dq", "dk", "dv", "d_magnitude", "d_noise", "d_radial",
        )],
    ]  # fmt: skip


@functools.cache
def _parallel() -> int:
    """Address of the OpenMP runtime's GOMP_parallel that torch itself uses, so that both share one set of threads."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            return ctypes.cast(ctypes.CDLL(str(folder / name)).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def native_obstacle(call: RobustCall) -> str | None:
    """Why the native kernels cannot take a call, or None."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU and these tensors are on {call.q.device.type}"
    if call.return_weights:
        return "it never holds the weights that were asked for"
    try:
        library(_real(call.score_dtype))
    except NotBuilt as reason:
        return str(reason)
    return None


def native_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention by the native kernels."""
    dtype, size = call.score_dtype, call.q.shape[3]
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    padding = -size % _lanes(dtype)
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    m = None if call.magnitude is None else call.magnitude.to(dtype)
    radial = None
    if call.radial_mode != "off":
        assert call.radial is not None, "RobustCall.check sees to it"
        radial = torch.stack([getattr(call.radial, name) for name in RADIAL_ROWS]).double()
    seed = int(torch.randint(2**62, (1,))) if call.dropout else 0
    out, log_evidence, m_bar, _, _ = native_forward(
        q, k, v, m, call.noise.rows(call.kernel, torch.float64), radial, call.documents,
        call.kernel, call.residual_form == "dot", call.decay_keys and call.kernel != "gaussian", call.decay_values,
        call.radial_mode, size / 2, call.dropout, seed,
    )  # fmt: skip
    v_bar = out[..., :size] if padding else out
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar if radial is not None else None)


def _real(dtype: torch.dtype) -> str:
    return "double" if dtype == torch.float64 else "float"


def _lanes(dtype: torch.dtype) -> int:
    return library(_real(dtype)).polarlm_vector_bytes() // dtype.itemsize


def _at(x: Tensor) -> _Strides:
    return _Strides(*x.stride()[:3])


def _rows(x: Tensor) -> Tensor:
    """Channels side by side, which is all the kernels ask of a layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _describe(q, k, v, m, noise, radial_noise, documents, kernel, dot_form, decay_keys, decay_values, radial, half,
              dropout, seed):  # fmt: skip
    """The call as the kernels take it, and the tensors that must live as long."""
    (batch, heads, queries, size), (groups, keys) = q.shape, k.shape[1:3]
    q, k, v = _rows(q), _rows(k), _rows(v)
    m = None if m is None else m.contiguous()
    if documents is not None:  # padded: the last queries are read in whole vectors
        documents = F.pad(documents.to(torch.int64 if q.dtype == torch.float64 else torch.int32).flatten(), (0, 64))
    noise = noise.contiguous()
    radial_noise = None if radial_noise is None else radial_noise.contiguous()
    work = batch * heads * queries * keys * size
    call = _Call(
        batch=batch, heads=heads, groups=groups, queries=queries, keys=keys, size=size, kernel=KERNELS.index(kernel),
        decay_keys=decay_keys, decay_values=decay_values, dot_form=dot_form, radial=RADIAL_MODES.index(radial),
        threads=torch.get_num_threads() if work >= WORTH_SHARING else 1, seed=seed, parts=1,
        half=half, dropout=dropout, cap=MAX_QUERY_PRECISION, least_magnitude=MIN_MAGNITUDE,
        q_at=_at(q), k_at=_at(k), v_at=_at(v), q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), magnitude=_address(m),
        documents=_address(documents), noise=noise.data_ptr(), radial_noise=_address(radial_noise),
    )  # fmt: skip
    return call, (q, k, v, m, documents, noise, radial_noise)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _gradient(gradients, outputs, given: dict[str, Any], wanted: set[str]) -> dict[str, Tensor]:
    found = native_backward(*gradients[:3], *outputs, **given, learns_shape="noise" in wanted)
    return dict(zip(DIFFERENTIABLE, found))


@differentiable("polarlm::native_forward", _gradient)
def native_forward(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, noise: Tensor, radial_noise: Tensor | None,
    documents: Tensor | None, kernel: str, dot_form: bool, decay_keys: bool, decay_values: bool, radial: str,
    half: float, dropout: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """v_bar (B,H,T,Dh), log-evidence (B,H,T), m_bar (B,T), and what its backward pass needs of the radial channel."""
    call, alive = _describe(
        q, k, v, m, noise, radial_noise, documents, kernel, dot_form, decay_keys, decay_values, radial, half, dropout,
        seed,
    )  # fmt: skip
    outputs = _empty_outputs(q, radial)
    for name, x in zip(("out", "evidence", "m_bar", "radial_evidence", "head_m_bar"), outputs):
        setattr(call, name, x.data_ptr())
    call.out_at = _at(outputs[0])
    library(_real(q.dtype)).polarlm_forward(ctypes.byref(call), ctypes.c_void_p(_parallel()))
    return outputs


def _empty_outputs(q: Tensor, radial: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, size = q.shape
    out = q.new_empty(batch, queries, heads, size).transpose(1, 2)  # as the projection behind it wants it
    per_token = (batch, queries) if radial != "off" else (0,)
    per_head = (batch, heads, queries) if radial == "shared" else (0,)
    return out, *(q.new_empty(shape) for shape in (q.shape[:3], per_token, per_token, per_head))


@native_forward.register_fake
def _(q, k, v, m, noise, radial_noise, documents, kernel, dot_form, decay_keys, decay_values, radial, *_options):
    return _empty_outputs(q, radial)


@torch.library.custom_op("polarlm::native_backward", mutates_args=())
def native_backward(
    d_out: Tensor, d_evidence: Tensor, d_m_bar: Tensor, out: Tensor, evidence: Tensor, m_bar: Tensor,
    radial_evidence: Tensor, head_m_bar: Tensor,
    q: Tensor, k: Tensor, v: Tensor, m: Tensor | None, noise: Tensor, radial_noise: Tensor | None,
    documents: Tensor | None, kernel: str, dot_form: bool, decay_keys: bool, decay_values: bool, radial: str,
    half: float, dropout: float, seed: int, learns_shape: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of DIFFERENTIABLE; empty where there is no such input."""
    call, alive = _describe(
        q, k, v, m, noise, radial_noise, documents, kernel, dot_form, decay_keys, decay_values, radial, half, dropout,
        seed,
    )  # fmt: skip
    (batch, heads, queries, size), (groups, keys) = q.shape, k.shape[1:3]
    units = batch * (groups if radial == "off" else 1)
    # Few units would leave threads idle: then the query blocks of a unit are shared out, each part with its own sums.
    parts = call.parts = min(-(-queries // BLOCK), 1 if units >= 4 * call.threads or units % call.threads == 0 else -(-2 * call.threads // units))  # fmt: skip
    d_out, d_evidence, d_m_bar = _rows(d_out), d_evidence.contiguous(), d_m_bar.contiguous()
    dq = torch.zeros_like(out)
    dk, dv = (q.new_zeros(parts, *k.shape) for _ in "kv")
    d_m = q.new_zeros((parts, batch, units // batch, keys) if m is not None else 0)
    d_noise = noise.new_zeros(parts, batch, heads, len(NOISE_ROWS))
    d_radial = noise.new_zeros(parts, batch, len(RADIAL_ROWS))
    tensors = dict(
        out=out, evidence=evidence, m_bar=m_bar, radial_evidence=radial_evidence, head_m_bar=head_m_bar,
        d_out=d_out, d_evidence=d_evidence, d_m_bar=d_m_bar,
        dq=dq, dk=dk, dv=dv, d_magnitude=d_m, d_noise=d_noise, d_radial=d_radial,
    )  # fmt: skip
    for name, x in tensors.items():
        setattr(call, name, x.data_ptr())
    call.out_at, call.d_out_at, call.dq_at, call.learns_shape = _at(out), _at(d_out), _at(dq), learns_shape
    library(_real(q.dtype)).polarlm_backward(ctypes.byref(call), ctypes.c_void_p(_parallel()))
    if parts > 1:
        dk, dv = dk.sum(0), dv.sum(0)
    d_m = d_m.sum((0, 2)) if m is not None else d_m
    d_radial = d_radial.sum((0, 1)) if radial_noise is not None else d_radial.new_empty(0)
    return dq, dk.view(k.shape), dv.view(v.shape), d_m, d_noise.sum((0, 1)).T.contiguous(), d_radial


@native_backward.register_fake
def _(d_out, d_evidence, d_m_bar, out, evidence, m_bar, radial_evidence, head_m_bar, q, k, v, m, noise, radial_noise,
      *_options, **_more):  # fmt: skip
    inputs = (k, v, m, noise, radial_noise)
    contiguous = torch.contiguous_format
    like = (q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in inputs)
    return torch.empty_like(out), *like
