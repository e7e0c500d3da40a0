"""Step 2 of Algorithm 1: transport into a common frame, by position (RoPE) or by content (G.2).

The rotation frequencies are shared by all heads, one slice of a bank per head (Appendix D.1; RFA's spectrally coupled
variant: slow heads first), or learned (Appendix F). They belong to the key heads; a query uses those of its key head.

`rotary` is RoPE. `phases`: every token adds its own angles to RoPE's; they commute, so a cumulative sum is enough.
`unitary`: every token applies R_s = D_s [I + (e^{i phi_s} - 1) a_s a_s^dagger] with RoPE's D_s and its
own axis and angle. These do not commute. With C_s = D_s ... D_1 the product is U_t = C_t W_t, W_t = H_t ... H_1, where
H_s = I + (e^{i phi_s} - 1) b_s b_s^dagger and b_s = C_{s-1}^{-1} a_s: RoPE, then the products of `unitary_products`.
Either way q, k and v enter the frame one by one and the estimate leaves it again: x -> U^dagger x, v_bar -> U v_bar.
Angles start at zero, so a fresh block is bit-identical to the rotary one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from polarlm.attention.estimator import choice
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import KeyValueCache, MixerShape, Rotary, TokenContext, split_heads
from polarlm.attention.parts.forgetting import running_sum
from polarlm.attention.parts.part import Part
from polarlm.geometry.content_transport import UnitaryProducts, chunk_size, unitary_products
from polarlm.geometry.sphere import normalise
from polarlm.geometry.transport import phase_tables, rotary_frequencies, rotary_tables, rotate, to_complex, to_real

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

KINDS = ("shared", "per_head", "learned")


class Turns(NamedTuple):
    """Rotary tables of the queries (per query head) and of the keys and values (per key head)."""

    queries: Rotary
    keys: Rotary

    def recorded(self) -> dict[str, Tensor]:
        """The queries' tables, under the names by which a record knows them."""
        return {"rotary_cos": self.queries[0], "rotary_sin": self.queries[1]}


class Frequencies(nn.Module):
    """The rotary frequencies of one mixer."""

    optim_group = "estimator"  # angles per token are scalars of the model of motion, not weights
    log_frequency: Tensor

    def __init__(self, kind: str, shape: MixerShape, dim: int) -> None:
        super().__init__()
        self.kind = choice("frequencies", kind, KINDS)
        self.group, self.dim, self.base = shape.n_head // shape.n_kv_head, dim, shape.rope_base
        heads = shape.n_kv_head
        if kind == "per_head":  # the spectrum of heads*dim channels, cut into heads from slow to fast
            bank = rotary_frequencies(heads * dim, shape.rope_base, dtype=torch.float64).flip(0).view(heads, -1)
            self.register_buffer("log_frequency", bank.log().float(), persistent=False)
        elif kind == "learned":
            bank = rotary_frequencies(dim, shape.rope_base, dtype=torch.float64).expand(heads, -1)
            self.log_frequency = nn.Parameter(bank.log().float())

    def one_step(self, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Tables of a single token's turn, (1, dim/2) or (1, heads, 1, dim/2)."""
        if self.kind == "shared":
            return rotary_tables(torch.ones(1, device=device), self.dim, self.base, dtype=dtype)
        cos, sin = phase_tables(torch.ones(1, device=device), self.log_frequency.to(dtype).exp()[:, None])
        return cos[None], sin[None]

    def forward(self, context: TokenContext) -> Turns:
        """The tables for this pass: (T, dim/2) where all heads share them, else (1 or B, heads, T, dim/2)."""
        if self.kind == "shared":
            return Turns(context.rotary, context.rotary)
        if context.positions is None:
            raise ValueError(f"frequencies={self.kind} needs TokenContext.positions")
        # Phases stay in fp32 or better: they reach 1e3 rad, where bf16 has lost the angle altogether.
        frequencies = self.log_frequency.to(context.rotary[0].dtype).exp()
        positions = context.positions.expand(1, -1) if context.positions.dim() == 1 else context.positions
        cos, sin = phase_tables(positions[:, None], frequencies[:, None])
        if self.group == 1:
            return Turns((cos, sin), (cos, sin))
        return Turns((cos.repeat_interleave(self.group, 1), sin.repeat_interleave(self.group, 1)), (cos, sin))


TRANSPORTS = ("rotary", "phases", "unitary")
COMPLEX_FLOPS = 8  # of one complex multiply-add


@dataclass(frozen=True)
class CommonFrame:
    """The way into the frame of comparison and back, for tokens (B, heads, T, Dh)."""

    turns: Turns
    products: UnitaryProducts | None = None  # per key head, (B, G, ...)

    def enter(self, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """U^dagger q, and U^dagger of vectors of the key heads; a query moves with the key head it looks at."""
        turned = (rotate(q, *self.turns.queries), *(rotate(x, *self.turns.keys) for x in others))
        if self.products is None:
            return turned
        modes = [self._by_key_head(x) for x in turned]
        moved = self.products.apply_adjoint(torch.cat(modes, dim=2)).split([x.shape[2] for x in modes], dim=2)
        return tuple(to_real(x).flatten(1, 2).to(q.dtype) for x in moved)

    def leave(self, x: Tensor) -> Tensor:
        """U v_bar of estimates in the common frame, one per query head."""
        if self.products is not None:
            x = to_real(self.products.apply(self._by_key_head(x))).flatten(1, 2).to(x.dtype)
        return rotate(x, *self.turns.queries, inverse=True)

    def recorded(self, v: Tensor) -> dict[str, Tensor]:
        """The queries' rotary tables; where these are not the whole way, also the values v in the common frame."""
        return self.turns.recorded() | ({} if self.products is None else {"v_common": v})

    def _by_key_head(self, x: Tensor) -> Tensor:
        """(B, heads, T, Dh) -> complex (B, G, heads per key head, T, Dh/2)."""
        assert self.products is not None
        return to_complex(x.to(self.products.axes.real.dtype)).unflatten(1, (self.products.axes.shape[1], -1))


class ContentTransport(nn.Module):
    """What every token adds to the rotation: angles of the modes, or an axis and an angle."""

    def __init__(self, kind: str, shape: MixerShape, dim: int) -> None:
        super().__init__()
        self.kind, self.groups, self.dim = kind, shape.n_kv_head, dim
        self.group = shape.n_head // shape.n_kv_head
        if kind == "phases":
            self.angles = linear(shape.d_model, self.groups * dim // 2, 0.0)
        else:
            self.angles = linear(shape.d_model, self.groups, 0.0)
            self.axes = linear(shape.d_model, self.groups * dim, shape.d_model**-0.5)

    def forward(self, x: Tensor, turns: Turns, frequencies: Frequencies, cache: KeyValueCache | None) -> CommonFrame:
        """The frame of the tokens x (B, T, d), whose rotary tables are `turns`."""
        wide = turns.keys[0].dtype
        angles = split_heads(self.angles(x), self.groups).to(wide)  # (B, G, T, modes or 1)
        if self.kind == "phases":
            return CommonFrame(self._turned(turns, angles, cache))
        axes = split_heads(self.axes(x), self.groups).to(wide)
        with torch.autocast(x.device.type, enabled=False):
            axes = rotate(axes, *turns.keys)
            axes = rotate(axes, *frequencies.one_step(wide, x.device), inverse=True)  # b_s: where token s - 1 stood
            products = unitary_products(
                to_complex(normalise(axes)), angles.squeeze(-1), None if cache is None else cache.running.get("product")
            )
        if cache is not None:
            cache.running["product"] = products.end
        return CommonFrame(turns, products)

    def _turned(self, turns: Turns, angles: Tensor, cache: KeyValueCache | None) -> Turns:
        """Rotary tables with the angles so far added to their phases; by the sum formula, so that 0 adds nothing."""
        total = running_sum(angles, 2)
        if cache is not None:
            total = total + cache.running.get("phase", 0.0)
            cache.running["phase"] = total[:, :, -1:]
        cos, sin = (table if table.dim() == 4 else table.unsqueeze(-3) for table in turns.keys)
        more_cos, more_sin = total.cos(), total.sin()
        keys = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
        if self.group == 1:
            return Turns(keys, keys)
        return Turns((keys[0].repeat_interleave(self.group, 1), keys[1].repeat_interleave(self.group, 1)), keys)

    def flops_per_token(self, vectors: int) -> int:
        """Of the products' construction and of `vectors` vectors (over all heads) that go in or out, per token."""
        flops = 2 * sum(layer.weight.numel() for layer in self.children() if isinstance(layer, nn.Linear))
        if self.kind == "phases":
            return flops
        modes = self.dim // 2
        chunk = chunk_size(modes)
        # Gram matrix and triangular solve see half a chunk on average; the chunk's product is spread over its tokens.
        build = self.groups * (chunk * modes + 2 * modes**2)
        moved = vectors * (chunk * modes + modes**2)
        return flops + COMPLEX_FLOPS * (build + moved)


class Transport(Part):
    """The frame of a polar block; values move with the keys unless `rotate_values` leaves them where they are."""

    def __init__(self, block: PolarAttention, *, transport: str, rotate_values: bool, frequencies: str) -> None:
        super().__init__(block)
        self.transport, self.rotate_values, self.frequencies = transport, rotate_values, frequencies
        # Whether the position alone decides, with frequencies that all heads share: the model's own tables then do.
        self.by_position = transport == "rotary" and frequencies == "shared"
        choice("transport", transport, TRANSPORTS)
        block.rotate_values = rotate_values
        block.frequencies = Frequencies(frequencies, block.shape, block.rotary_dim)
        block.transport = None if transport == "rotary" else ContentTransport(transport, block.shape, block.rotary_dim)

    def __call__(self, x: Tensor, context: TokenContext) -> CommonFrame:
        """The frame of the tokens x (B, T, d)."""
        turns, content = self.block.frequencies(context), self.block.transport
        return CommonFrame(turns) if content is None else content(x, turns, self.block.frequencies, context.cache)

    def flops_per_token(self, context: int) -> int:
        """Keys and queries go in, values too and their estimates out again."""
        content, shape = self.block.transport, self.block.shape
        return (
            0
            if content is None
            else content.flops_per_token((1 + self.rotate_values) * (shape.n_head + shape.n_kv_head))
        )
