"""One layer as the probe sees it: the record a block filled, brought to the same shapes for every block.

Shapes: B sequences, T tokens, H query heads, Dh head size, D = H·Dh latent size, d model size.
Units: a vector's size is its root mean square, ‖x‖/√dim, so that it does not depend on how wide the model is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polarlm.attention.mixer import Record, merge_heads
from polarlm.geometry import rotate
from polarlm.geometry.robust import causal_mask

TINY = 1e-12
MIN_STEP = 1e-6  # a step this much smaller than its state is rounding: a first token under projection stands still


@dataclass(frozen=True)
class Layer:
    """What one block did to one batch; everything in fp32 or better."""

    before: Tensor  # (B, T, d) residual stream z
    middle: Tensor  # (B, T, d) z after attention
    after: Tensor  # (B, T, d) z after the feed-forward
    values: Tensor  # (B, H, T, Dh) v as the block averages it: the direction alone where it splits off a magnitude
    magnitude: Tensor  # (B, T) m: the block's own, else the size of v over all heads
    estimate: Tensor  # (B, H, T, Dh) v̄ = Σ A v, back in the token's own frame
    update: Tensor  # (B, H, T, Dh) the directional step that enters W_o
    weights: Tensor  # (B, H, T, T) attention A
    log_evidence: Tensor  # (B, H, T)
    visible: Tensor  # (B or 1, T, T) which keys a query may see
    rotary: tuple[Tensor, Tensor] | None  # tables that transport values; None when the block does not
    parameters: dict[str, Tensor]  # the filter's scalars, () or (H,)
    record: Record  # the rest, as the block gave it

    @cached_property
    def direction(self) -> Tensor:
        """V (B, T, D): the latent state at size 1, ‖V‖ = √D over all heads."""
        joined = merge_heads(self.values)
        return joined / root_mean_square(joined).clamp_min(TINY).unsqueeze(-1)

    @cached_property
    def state(self) -> Tensor:
        """x = m·V (B, T, D): the latent state that the update moves."""
        return self.magnitude.unsqueeze(-1) * self.direction

    @property
    def alpha(self) -> Tensor:
        """Step size, shaped to multiply (B, H, T, Dh); 1 where a block has none."""
        return self.parameters.get("alpha", torch.ones((), device=self.values.device)).reshape(-1, 1, 1)

    def transported(self) -> Tensor:
        """The values as the others see them: turned into the common frame when the block rotates values."""
        if self.rotary is None:
            return self.values
        if "v_common" in self.record:
            common = wide(self.record["v_common"])
            return common.repeat_interleave(self.values.shape[1] // common.shape[1], dim=1)
        return rotate(self.values, *self.rotary)


def read_layer(record: Record, *, rotates_values: bool, documents: Tensor | None) -> Layer:
    """Bring a block's record to common shapes: grouped heads repeated, fp32, names of the paper."""
    estimate, values = wide(record["v_bar"]), wide(record["v"])
    values = values.repeat_interleave(estimate.shape[1] // values.shape[1], dim=1)
    tokens = estimate.shape[2]
    mask = causal_mask(tokens, documents=documents, device=values.device)
    magnitude = record["magnitude"] if "magnitude" in record else root_mean_square(merge_heads(values))
    return Layer(
        before=wide(record["residual_in"]),
        middle=wide(record["residual_mid"]),
        after=wide(record["residual_out"]),
        values=values,
        magnitude=wide(magnitude),
        estimate=estimate,
        update=wide(record["update"]),
        weights=wide(record["weights"]),
        log_evidence=wide(record["log_evidence"]),
        visible=mask[None] if mask.dim() == 2 else mask,
        rotary=(wide(record["rotary_cos"]), wide(record["rotary_sin"])) if rotates_values else None,
        parameters={ALIASES.get(name, name): wide(value) for name, value in record.get("params", {}).items()},
        record=record,
    )


# RFA's scalars are those of the paper's directional channel; one name each lays the blocks side by side.
ALIASES = {"nu": "nu_t", "eta_q": "eta_tq", "eta_k": "eta_tk", "sigma_0": "sigma_t0"}


def wide(x: Tensor) -> Tensor:
    """At least fp32: statistics of bf16 tensors must not add rounding of their own."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def root_mean_square(x: Tensor) -> Tensor:
    """‖x‖/√dim over the last axis."""
    return x.square().mean(-1).sqrt()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """cos∠(a, b) over the last axis; NaN where one of them is zero and has no direction."""
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > TINY, (a * b).sum(-1) / size.clamp_min(TINY), torch.nan)


def tangency(state: Tensor, step: Tensor) -> Tensor:
    """cos∠(state, step): 0 when the step is tangent to the sphere; NaN where the step is only rounding noise."""
    moved = step.norm(dim=-1) > MIN_STEP * state.norm(dim=-1)
    return torch.where(moved, cosine(state, step), torch.nan)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """∠(a, b) in radians, accurate for small angles where arccos is not (Kahan)."""
    a, b = a / a.norm(dim=-1, keepdim=True).clamp_min(TINY), b / b.norm(dim=-1, keepdim=True).clamp_min(TINY)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson correlation over the last axis; NaN when one of them does not vary."""
    x, y = centred(x), centred(y)
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def line_fit(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R² of the least-squares line y = a + slope·x over the last axis; NaN when x does not vary."""
    x, y = centred(x), centred(y)
    return (x * y).sum(-1) / x.square().sum(-1), pearson(x, y).square()


def centred(x: Tensor) -> Tensor:
    """x without its mean over the last axis, in float64 where the device has it: small spreads keep their digits."""
    x = x if x.device.type == "mps" else x.double()
    return x - x.mean(-1, keepdim=True)
