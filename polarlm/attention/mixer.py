"""What every token mixer (the attention half of a block) shares: its shape, its contract, its cache.

Shapes: B batch, T new tokens, S tokens attended to (cache included), H query heads, G key/value heads, Dh head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention.initialisation import Initialisation
from polarlm.operations import open_door

Rotary = tuple[Tensor, Tensor]  # cosine and sine tables (T, rotary_dim/2), or (B, T, rotary_dim/2) with documents
Record = dict[str, Any]


@dataclass(frozen=True)
class MixerShape:
    """Everything a mixer needs to know about the model it stands in; the hyperparameters come from its own yaml."""

    d_model: int
    n_head: int
    n_kv_head: int
    head_dim: int
    layer: int
    n_layer: int
    dropout: float = 0.0
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    stream_std: float = 0.02  # RMS of a fresh residual stream where it enters the first layer
    init: str = "width"  # Initialisation.kind
    zero_init: bool = False  # maps that add to the residual stream start at zero

    @property
    def initial(self) -> Initialisation:
        """How large this model's fresh matrices are."""
        return Initialisation(self.init, self.n_layer, self.zero_init)


class KeyValueCache:
    """Keys, values and (for magnitude-aware blocks) magnitudes of the tokens one layer has already seen."""

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        magnitude: bool = False,
    ) -> None:
        self.length = 0
        self.decoder: Any = None  # polarlm/fast: made at the first single token; False: the layer has none
        self.running: dict[str, Tensor] = {}  # what a mixer carries from token to token beside these, rows first
        self.keys = torch.zeros(batch, heads, length, head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.magnitudes = torch.zeros(batch, length, device=device, dtype=dtype) if magnitude else None

    def append(
        self, keys: Tensor, values: Tensor, magnitude: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store T new tokens; returns keys, values (B, G, S, Dh) and magnitudes (B, S) of everything stored so far."""
        start, stop = self.length, self.length + keys.shape[2]
        if stop > self.keys.shape[2]:
            raise ValueError(f"the cache holds {self.keys.shape[2]} tokens, {stop} were given; make it longer")
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        if self.magnitudes is not None and magnitude is not None:
            self.magnitudes[:, start:stop] = magnitude
            magnitude = self.magnitudes[:, :stop]
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop], magnitude


@dataclass(frozen=True)
class TokenContext:
    """What a mixer gets besides x: the positions of the tokens, their mask, and the cache and records to fill."""

    rotary: Rotary
    documents: Tensor | None = None  # (B, T) ids that attention must not cross
    cache: KeyValueCache | None = None  # holds the tokens before these, and takes these
    record: Record | None = None  # filled with the intermediate quantities of this same pass
    positions: Tensor | None = None  # (T,), or (B, T) with documents; for mixers with frequencies of their own
    shared: dict[str, Tensor] = field(default_factory=dict)  # what one layer of a pass hands to the later ones


class Mixer(nn.Module):
    """A causal map (B, T, d_model) -> (B, T, d_model); subclasses write `forward` and `flops_per_token`."""

    pre_norm = True  # False: the block hands over the raw residual stream
    tie_output = False  # True: W_o is not a matrix of its own but W_v transposed
    rotate_values = False  # True: values are transported like keys; diagnostics compares directions in one frame
    normalised_weights = True  # False: recorded weights do not sum to 1 (sigmoid attention); W v = mean holds for all
    calibrated = True  # False: W_o keeps the scale it was built with
    backend = "auto"  # of robust attention
    input_rms = 1.0  # of the stream a fresh model hands over
    qkv: nn.Linear  # of most mixers: all three projections in one
    out: nn.Linear  # W_o, whose output is added to the residual stream

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()
        open_door()
        self.shape = shape
        self.forget: Any = None  # a ForgetGate where the past fades

    @property
    def rotary_dim(self) -> int:
        """Head size the rotary tables are made for."""
        return self.shape.head_dim

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Mix tokens causally."""
        raise NotImplementedError

    @contextlib.contextmanager
    def unit_step(self) -> Iterator[None]:
        """Set the step size to 1 inside the `with` block; mixers without a step size do nothing."""
        yield

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        """An empty cache for `length` tokens."""
        return KeyValueCache(batch, self.shape.n_kv_head, length, self.rotary_dim, device, dtype)

    def flops_per_token(self, context: int) -> int:
        """Forward floating-point operations per token, averaged over the causal positions of a context."""
        raise NotImplementedError


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads*Dh) -> (B, heads, T, Dh)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, Dh) -> (B, T, heads*Dh)."""
    return x.transpose(1, 2).flatten(-2)


def mean_visible(context: int) -> float:
    """Keys a query sees on average under the causal mask."""
    return (context + 1) / 2
