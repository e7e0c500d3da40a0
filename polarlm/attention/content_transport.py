"""How vectors are brought into a frame where they can be compared (Appendix G.2): rotary, or led by the content.

`rotary` is RoPE. `phases`: every token adds angles of its own to RoPE's; they commute, so a cumulative sum does it.
`unitary`: every token applies R_s = D_s [I + (e^{i phi_s} - 1) a_s a_s^dagger] with RoPE's D_s and an axis and angle of
its own. These do not commute. With C_s = D_s ... D_1 the product is U_t = C_t W_t, W_t = H_t ... H_1, where
H_s = I + (e^{i phi_s} - 1) b_s b_s^dagger and b_s = C_{s-1}^{-1} a_s: RoPE, then the products of `unitary_products`.
Either way q, k and v enter the frame one by one and the estimate leaves it again: x -> U^dagger x, v_bar -> U v_bar.
Angles start at zero, so a fresh block is the rotary one bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polarlm.attention.forgetting import running_sum
from polarlm.attention.frequencies import Frequencies, Turns
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import KeyValueCache, MixerShape, split_heads
from polarlm.geometry.sphere import normalise
from polarlm.geometry.transport import rotate, to_complex, to_real
from polarlm.geometry.unitary_products import UnitaryProducts, chunk_size, unitary_products

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
