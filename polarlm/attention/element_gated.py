"""Gated attention with a gate per channel (Qiu et al. 2025): the heads' output is multiplied by sigmoid(W_g x).

The best published variant; `gated` has one gate per head, which starts at 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import MixerShape, TokenContext, merge_heads, split_heads
from polarlm.attention.parts.forgetting import fading
from polarlm.attention.standard import StandardAttention, attention_weights
from polarlm.geometry.transport import rotate


class ElementGatedAttention(StandardAttention):
    """Standard attention with W_o(y * sigmoid(W_g x))."""

    def __init__(self, shape: MixerShape, **standard: Any) -> None:
        super().__init__(shape, **standard)
        self.output_gate = linear(shape.d_model, shape.n_head * shape.head_dim, shape.initial.hidden(shape.d_model))

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """Standard attention, then the gate."""
        turns = self.frequencies(context)
        q, k, v = split_heads(self.qkv(x), sum(self.heads)).split(self.heads, dim=1)
        k, v = self.shift(x, k, v, context)
        if self.q_norm is not None and self.k_norm is not None:
            wide = torch.promote_types(v.dtype, torch.float32)  # norms are fp32 or better
            q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
        q_turned, k_turned = self.place(q, k, turns, context)
        v_turned = rotate(v, *turns.keys) if self.rotate_values else v
        if context.cache is not None:
            k_turned, v_turned, _ = context.cache.append(k_turned, v_turned)
        bias = None
        if self.forget is None:
            v_bar = self._attend(q_turned, k_turned, v_turned, context.documents, None)
        else:
            forgotten = self.forget.forgotten(x, context)
            bias = None if context.record is None else fading(forgotten, x.shape[1])
            v_bar = self._attend_fading(q_turned, k_turned, v_turned, context.documents, forgotten)
        if self.rotate_values:
            cos, sin = turns.queries
            v_bar = rotate(v_bar, cos, sin, inverse=True)
        if context.record is not None:
            weights, log_evidence = attention_weights(q_turned, k_turned, context.documents, bias)
            context.record.update(q=q, k=k, v=v, v_bar=v_bar, update=v_bar, **turns.recorded())
            context.record.update(weights=weights, log_evidence=log_evidence)
        return self.out(merge_heads(self.leaving(v_bar)) * torch.sigmoid(self.output_gate(x)))

    def shift(self, x: Tensor, k: Tensor, v: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Keys and values unchanged; a subclass mixes in those of the previous token."""
        return k, v

    def leaving(self, v_bar: Tensor) -> Tensor:
        """The output of the heads before the gate."""
        return v_bar

    def flops_per_token(self, context: int) -> int:
        """FLOPs of standard attention and of the gate."""
        return super().flops_per_token(context) + 2 * self.output_gate.weight.numel()
