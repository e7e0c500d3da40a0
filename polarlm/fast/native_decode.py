"""Decoding by native code (native/layer.h and decode.h): one call per layer and token.

What stays the same while a text grows (scalars, tables over lags, addresses) is set up once per generation and layer.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarlm.attention.robust.call import DirectionalNoise, RadialNoise
from polarlm.geometry.multihead import PROJECTIONS
from polarlm.geometry.precision import MAX_QUERY_PRECISION, MIN_MAGNITUDE

from .build import library
from .native_backend import VECTOR_BYTES, Call, Strides, address, parallel, switches_of, unbuilt

VECTOR = VECTOR_BYTES // 4  # numbers of the widest vectors


class _Decode(ctypes.Structure):
    """`struct Decode` of native/decode.h."""

    _fields_ = [
        ("call", Call),
        *[(name, ctypes.c_int64) for name in ("projection", "turns_values", "norms_values", "alpha_by_m")],
        *[(name, ctypes.c_int64) for name in ("token_row", "cache_row", "magnitude_row")],
        *[(name, ctypes.c_double) for name in ("radius", "eps", "alpha", "beta", "clamp")],
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values", "magnitudes", "log_forget", "forgotten", "tables")],
    ]


class _Layer(ctypes.Structure):
    """`struct Layer` of native/layer.h."""

    _fields_ = [
        ("heads", ctypes.POINTER(_Decode)),
        *[(name, ctypes.c_int64) for name in ("rows", "width", "hidden", "gated", "threads")],
        ("across", ctypes.c_int64 * 2),
        ("outputs", ctypes.c_int64 * 2),
        ("eps", ctypes.c_double),
        ("projections", ctypes.c_void_p * 2),
        *[(name, ctypes.c_void_p) for name in ("out", "up", "down")],
        ("norms", ctypes.c_void_p * 2),
        *[(name, ctypes.c_void_p) for name in ("gate", "gate_offset", "x", "memory")],
    ]


@dataclass(frozen=True)
class Matrices:
    """The weights of a pre-norm layer, as they lie in its modules."""

    norms: tuple[Tensor, Tensor]
    projections: tuple[Tensor, ...]  # one or two, which give q, k and v side by side
    out: Tensor
    up: Tensor
    down: Tensor
    gated: bool  # SwiGLU, else GELU
    across: tuple[bool, bool]  # whether attention and feed-forward add only what is orthogonal to the stream
    eps: float
    gate: tuple[Tensor | None, Tensor] | None = None  # of forgetting: its rows (H,d), or none, and its offsets (H,)


@dataclass(frozen=True)
class Recipe:
    """What a mixer does around robust attention, in numbers."""

    heads: int
    kernel: str
    noise: DirectionalNoise
    rotate_values: bool
    qk_radius: float  # RMS of a channel of q and k; 0 leaves them as they are
    eps: float
    residual_form: str = "full"
    decay_keys: bool = False
    decay_values: bool = False
    norm_values: bool = False
    radial_mode: str = "off"
    radial: RadialNoise | None = None
    radial_correlation: str = "vv"
    projection: str = "none"
    evidence_clamp: float | None = None
    alpha: float = 1.0
    alpha_by_m: bool = False
    beta: float = 0.0
    forgets: bool = False


def takes_decoding(x: Tensor, cache: Any) -> bool:
    """Whether x (B,1,D) is one token per row that native code can decode into this cache; not if it grows."""
    keys = getattr(cache, "keys", None)
    if (
        keys is None
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.shape[1] != 1
    ):
        return False
    fits = x.dtype == keys.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return fits and x.numel() > 0 and keys.shape[3] % VECTOR == 0 and unbuilt(x.dtype) is None


class LayerDecoder:
    """A whole layer's generation in one call per token: it appends to the caches it was made for.

    The weights are read where they are.
    """

    def __init__(
        self, recipe: Recipe, weights: Matrices, keys: Tensor, values: Tensor, magnitudes: Tensor | None
    ) -> None:
        rows, _, self.capacity, _ = keys.shape
        self.stored = 0  # tokens, when it last ran
        self.forgotten = keys.new_zeros(rows, recipe.heads, self.capacity) if recipe.forgets else None  # sums of log λ
        self._heads = heads = self._new_heads(recipe, keys, values, magnitudes)
        width, hidden = weights.down.shape
        outputs = [len(w) for w in weights.projections] + [0] * (2 - len(weights.projections))
        numbers = width + recipe.heads + sum(outputs) + weights.out.shape[1] + len(weights.up) + hidden
        memory = weights.out.new_empty(rows * numbers)
        self._layer = layer = _Layer(
            ctypes.pointer(heads), rows=rows, width=width, hidden=hidden, gated=weights.gated, eps=weights.eps
        )
        layer.outputs[:], layer.across[:] = outputs, weights.across
        layer.projections[: len(weights.projections)] = [w.data_ptr() for w in weights.projections]
        layer.norms[:] = [w.data_ptr() for w in weights.norms]
        layer.out, layer.up, layer.down = (w.data_ptr() for w in (weights.out, weights.up, weights.down))
        layer.gate, layer.gate_offset = map(address, weights.gate or (None, None))
        layer.memory = memory.data_ptr()
        self._alive += (weights, memory)
        self._run = library("float").polarlm_layer

    def _new_heads(self, recipe: Recipe, keys: Tensor, values: Tensor, magnitudes: Tensor | None) -> _Decode:
        _, groups, capacity, size = keys.shape
        radial = None if recipe.radial is None else recipe.radial.rows(torch.float64)
        noise = recipe.noise.rows(recipe.kernel, torch.float64)
        self._alive: tuple[Any, ...] = (keys, values, magnitudes, noise, radial)
        call = Call(
            1, recipe.heads, groups, 1, capacity, size, *switches_of(recipe),
            1, 1, 0, False, capacity, size / 2, 0.0, MAX_QUERY_PRECISION, MIN_MAGNITUDE,
        )  # fmt: skip
        call.q_at = call.out_at = Strides(0, size, size)  # one query: its heads lie side by side
        call.k_at = call.v_at = Strides(*keys.stride()[:3])
        call.point(noise=noise, radial_noise=radial, magnitude=magnitudes)
        clamp = -1.0 if recipe.evidence_clamp is None else recipe.evidence_clamp
        heads = _Decode(
            call, PROJECTIONS.index(recipe.projection), recipe.rotate_values, recipe.norm_values,
            recipe.alpha_by_m, 0, keys.stride(0), 0 if magnitudes is None else magnitudes.stride(0),
            recipe.qk_radius, recipe.eps, recipe.alpha, recipe.beta, clamp,
        )  # fmt: skip
        heads.keys, heads.values = address(keys), address(values)
        heads.magnitudes, heads.forgotten = address(magnitudes), address(self.forgotten)
        make, drop = library("float").polarlm_new_tables, library("float").polarlm_drop_tables
        make.restype, drop.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        heads.tables = make(ctypes.byref(call))
        weakref.finalize(self, drop, heads.tables)
        return heads

    def remember(self, forgotten: Tensor) -> None:
        """The sums of log λ of all tokens so far, of tokens that did not come through here."""
        if self.forgotten is not None:
            self.forgotten[..., : forgotten.shape[-1]] = forgotten

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, stored: int) -> Tensor:
        """The stream (B,1,d) after this layer, from that before it, of the token after `stored` others."""
        if stored >= self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {stored + 1} were given; make it longer")
        y, self.stored = x.clone(memory_format=torch.contiguous_format), stored + 1
        self._heads.call.keys = stored + 1
        self._heads.cos, self._heads.sin = cos.data_ptr(), sin.data_ptr()
        self._layer.threads, self._layer.x = torch.get_num_threads(), y.data_ptr()
        self._run(ctypes.byref(self._layer), parallel())
        return y
