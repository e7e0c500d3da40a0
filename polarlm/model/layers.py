"""The polar block for any torch model: PolarSelfAttention (the attention alone) and PolarBlock (the residual block).

layer = PolarSelfAttention(d_model=512, n_head=8)
y = layer(x)                                        # (B, T, 512) -> (B, T, 512), causal

Both apply rotary positions themselves. They are the same modules that GPT uses.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention import PolarAttention
from polarlm.attention.calibration import calibrate
from polarlm.attention.mixer import KeyValueCache, MixerShape, TokenContext
from polarlm.attention.parts import KINDS
from polarlm.block_keys import OLD, PARTS, SYMBOLS
from polarlm.errors import UserError, did_you_mean
from polarlm.geometry import rotary_tables
from polarlm.model.block import build_block, decode_layer, mixer_shape
from polarlm.model.config import GPTConfig
from polarlm.model.gpt import document_positions
from polarlm.operations import closed
from polarlm.settings import read_settings


class _Layer(nn.Module):
    """What both layers share: the checks of their arguments, positions, and the cache."""

    shape: MixerShape

    @property
    def _mixer(self) -> PolarAttention:
        raise NotImplementedError

    def new_cache(self, batch: int, length: int) -> KeyValueCache:
        """An empty cache for `length` tokens in each of `batch` rows; pass it to every call of one running text."""
        for name, value in (("batch", batch), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        weight = self._mixer.v.weight
        return self._mixer.new_cache(batch, length, weight.device, weight.dtype)

    def _context(self, x: Tensor, documents: Tensor | None, cache: KeyValueCache | None) -> TokenContext:
        self._check_inputs(x, documents, cache)
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        if documents is not None:
            positions = document_positions(documents)
        dtype = torch.promote_types(self._mixer.v.weight.dtype, torch.float32)
        rotary = rotary_tables(positions, self._mixer.rotary_dim, self.shape.rope_base, dtype=dtype)
        return TokenContext(rotary, documents, cache, positions=positions)

    def _check_inputs(self, x: Any, documents: Any, cache: Any) -> None:
        width = self.shape.d_model
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            raise UserError(f"x is {kind}; it must be a floating-point tensor of shape (batch, tokens, {width}).")
        if x.dim() != 3 or x.shape[-1] != width:
            raise UserError(f"x has the shape {tuple(x.shape)}; it must be (batch, tokens, d_model={width}).")
        if documents is not None and cache is not None:
            raise UserError("documents and cache exclude each other: a cache holds one running text per row.")
        if documents is not None and (not isinstance(documents, Tensor) or documents.shape != x.shape[:2]):
            given = tuple(documents.shape) if isinstance(documents, Tensor) else repr(documents)
            raise UserError(f"documents is {given}; it must be a tensor of document ids of shape {tuple(x.shape[:2])}.")
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise UserError(f"cache is of type {type(cache).__name__}; make one with layer.new_cache(batch, length).")
        if cache is not None and cache.keys.shape[0] != x.shape[0]:
            raise UserError(f"cache has {cache.keys.shape[0]} rows and x has {x.shape[0]}; make one for that batch.")


class PolarSelfAttention(_Layer):
    """Causal polar attention with rotary positions, in place of a self-attention module; x is the normalised stream.

    `options` are those of PolarAttention: its parts and symbols. A fresh layer adds as much as one of `n_layer` layers
    should. The projection of the step off the residual stream needs the stream: PolarBlock has it.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        *,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        n_layer: int = 1,
        dropout: float = 0.0,
        rope_base: float = 10000.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if "frame" in options:
            raise UserError("frame changes what is added to the residual stream; use PolarBlock for it.")
        sizes = dict(d_model=d_model, n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, n_layer=n_layer)
        config = _size(**sizes, dropout=dropout, rope_base=rope_base)
        self.shape = mixer_shape(config, 0, stream_std=1.0)
        _check_options(type(self), options)
        self.attention = _build(lambda: PolarAttention(self.shape, **options))
        _check_alone(self.attention)
        calibrate(self.attention)

    @property
    def _mixer(self) -> PolarAttention:
        return self.attention

    def forward(self, x: Tensor, *, documents: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model).

        `documents` (B, T) holds ids that attention does not cross; `cache` holds the tokens before x and takes x.
        """
        context = self._context(x, documents, cache)
        if self.attention.backend == "reference" and not torch.compiler.is_compiling():
            with closed():
                return self.attention(x, context)
        return self.attention(x, context)


class PolarBlock(_Layer):
    """The whole residual block: norm, polar attention, feed-forward, and steps orthogonal to the stream.

    `frame` is the residual frame: in pre+tangent (the default) attention adds only what is orthogonal to the stream, in
    pre+tangent_both the feed-forward too. Other `options` are those of PolarAttention.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        *,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        n_layer: int = 1,
        dropout: float = 0.0,
        rope_base: float = 10000.0,
        ffn: str = "swiglu",
        ffn_mult: float = 4.0,
        norm_eps: float = 1e-6,
        frame: str = "pre+tangent",
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = dict(d_model=d_model, n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, n_layer=n_layer)
        others = dict(dropout=dropout, rope_base=rope_base, ffn=ffn, ffn_mult=ffn_mult, norm_eps=norm_eps, frame=frame)
        config = _size(**sizes, **others)
        self.shape = mixer_shape(config, 0, stream_std=1.0)
        _check_options(type(self), options)
        mixer = functools.partial(PolarAttention, **options)
        self.block = _build(lambda: build_block(config, self.shape, mixer))
        _check_alone(self._mixer)

    @property
    def _mixer(self) -> PolarAttention:
        assert isinstance(self.block.mixer, PolarAttention)
        return self.block.mixer

    def forward(self, x: Tensor, *, documents: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """The residual stream (B, T, d_model) after this block; `documents` and `cache` as in PolarSelfAttention."""
        context = self._context(x, documents, cache)
        return self.block(x, context) if cache is None else decode_layer(self.block, x, context)


def _size(**sizes: Any) -> GPTConfig:
    return _build(lambda: read_settings(GPTConfig, {**sizes, "vocab_size": 1, "context": 1}, ""))


def _check_options(layer: type, options: dict[str, Any]) -> None:
    """Names of PolarAttention's options; the values are checked by PolarAttention itself."""
    known = [*PARTS, *SYMBOLS, "frozen", "backend", *(name for part in KINDS.values() for name in part.arguments())]
    for name, value in options.items():
        if name not in known:
            near = did_you_mean(name, [*known, *inspect.signature(layer).parameters])
            raise UserError(f"{layer.__name__} has no argument '{name}'. {near}See PolarAttention for all.")
        if name in OLD and isinstance(OLD[name][1], bool) and not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}; it must be True or False.")
    if isinstance(frozen := options.get("frozen", ()), str):
        raise UserError(f"frozen is {frozen!r}; it must be a list of names.")


def _check_alone(mixer: PolarAttention) -> None:
    """What one layer hands to the next inside a GPT needs a GPT: a layer on its own has no such neighbour."""
    if mixer.value_residual is not None:
        raise UserError("value_residual=True passes something from layer to layer, so it needs polarlm.model.GPT.")
    if mixer.parts.precision.carried:
        raise UserError("precision='carried' passes something from layer to layer, so it needs polarlm.model.GPT.")


def _build(make: Any) -> Any:
    """What `make` returns; its refusals name the argument, not the key of a configuration."""
    try:
        return make()
    except UserError as error:
        raise UserError(str(error).replace("block.", "").replace("block/", "").replace("model.", "")) from None
