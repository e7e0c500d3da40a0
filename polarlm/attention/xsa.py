"""Exclusive Self Attention (Zhai 2026): the output of a head has no component along the token's own value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polarlm.attention.mixer import MixerShape
from polarlm.attention.standard import StandardAttention
from polarlm.errors import UserError
from polarlm.geometry import project


class ExclusiveAttention(StandardAttention):
    """Standard attention, then z_h = y_h - <y_h, v_h> v_h / ||v_h||^2 in every head (of the chosen layers)."""

    def __init__(self, shape: MixerShape, *, layers: Sequence[int] | None = None, **standard: Any) -> None:
        super().__init__(shape, **standard)
        outside = [layer for layer in layers or () if not 0 <= layer < shape.n_layer]
        if outside:
            raise UserError(f"block.layers names layer {outside[0]}, but the layers are 0 to {shape.n_layer - 1}.")
        self.exclusive = layers is None or shape.layer in layers

    def combine(self, v_bar: Tensor, own: Tensor) -> Tensor:
        """Remove each head's own value direction; a group of query heads shares one value head by broadcasting."""
        if not self.exclusive:
            return v_bar
        groups = v_bar.unflatten(1, (own.shape[1], -1))  # (B, G, H/G, T, Dh)
        # Heads are an axis like any other here, so the single-vector projection applies to all of them at once.
        return project(own.unsqueeze(2).expand_as(groups), groups, mode="per_head").flatten(1, 2)
