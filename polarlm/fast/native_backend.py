"""Robust attention by the native kernels (native/): one call per pass, all cores, O(N) memory, float32 and float64."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef

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


# -------------------------------------------------------------------- differentiable operators, arguments by name

# (gradients of the outputs, outputs, arguments by name, which of them want a gradient) -> gradients by name
Gradient = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Any], set[str]], dict[str, Tensor]]


def differentiable(name: str, gradient: Gradient) -> Callable[[Callable[..., tuple[Tensor, ...]]], Operator]:
    """Register a function of tensors and plain values as the operator `name` with that gradient.

    The gradient of an argument that is None is dropped, so `gradient` may return one for every tensor it knows.
    """

    def register(function: Callable[..., tuple[Tensor, ...]]) -> Operator:
        names = tuple(inspect.signature(function).parameters)

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            given = dict(zip(names, inputs, strict=True))
            ctx.tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
            ctx.plain = {key: value for key, value in given.items() if not isinstance(value, Tensor)}
            ctx.outputs = len(output)
            ctx.save_for_backward(*output, *(given[key] for key in ctx.tensors))

        def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            tensors = dict(zip(ctx.tensors, saved[ctx.outputs :], strict=True))
            given = {key: tensors.get(key, ctx.plain.get(key)) for key in names}
            wanted = {key for key, needed in zip(names, ctx.needs_input_grad, strict=True) if needed}
            by_name = gradient(gradients, saved[: ctx.outputs], given, wanted)
            return tuple(by_name.get(key) if key in tensors else None for key in names)

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
                output = function(*inputs)
                save(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                return differentiate(ctx, *gradients)

        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_autograd(differentiate, setup_context=save)
        return Operator(operator, Eager.apply, function)

    return register


class Operator:
    """A registered operator that is called the short way where nobody traces: dispatching one costs 0.1 to 0.3 ms."""

    def __init__(self, traced: CustomOpDef, eager: Callable[..., tuple[Tensor, ...]], bare: Callable) -> None:
        self.traced, self.eager, self.bare = traced, eager, bare

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        if not _plain(inputs[0]):
            return self.traced(*inputs)
        return self.eager(*inputs) if torch.is_grad_enabled() else self.bare(*inputs)


def operator(name: str) -> Callable[[Callable[..., tuple[Tensor, ...]]], Operator]:
    """Register a function of tensors and plain values, not differentiable, as the operator `name`."""
    return lambda function: Operator(torch.library.custom_op(name, function, mutates_args=()), function, function)


def dense_channels(x: Tensor) -> Tensor:
    """Channels side by side, which is all that kernels ask of a layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _plain(x: Tensor) -> bool:
    """Whether a tensor holds numbers, and is not a stand-in for tracing."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


# -------------------------------------------------------------------------------------- robust attention as one


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
