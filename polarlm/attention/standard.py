"""The baseline: scaled dot-product attention with RoPE, optional QK-norm, grouped heads and value rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.additions import HeadGate, ValueResidual
from polarlm.attention.estimator import Value
from polarlm.attention.initialisation import linear
from polarlm.attention.mixer import (
    Mixer,
    MixerShape,
    TokenContext,
    mean_visible,
    split_heads,
)
from polarlm.attention.parts.forgetting import fading, forget_gate
from polarlm.attention.parts.transport import Frequencies, Turns
from polarlm.attention.projections import rotated_heads
from polarlm.attention.robust import DirectionalNoise, RobustCall, robust_attention
from polarlm.errors import UserError
from polarlm.geometry.robust import causal_mask
from polarlm.geometry.transport import rotate


class StandardAttention(Mixer):
    """Causal multi-head attention of a pre-norm GPT; `rotate_values` transports values like keys (RoVE)."""

    def __init__(
        self,
        shape: MixerShape,
        qk_norm: bool = False,
        rotate_values: bool = False,
        frequencies: str = "shared",
        head_gate: bool = False,
        value_residual: bool = False,
        qk_gain: float = 1.0,
        forgetting: str = "none",
        forget_bias: Value = 0.0,
    ) -> None:
        super().__init__(shape)
        if qk_gain != 1 and not qk_norm:
            raise UserError(f"block.qk_gain={qk_gain:g} is where QK-norm's gains start; it needs block.qk_norm=true.")
        self.frequencies = Frequencies(frequencies, shape, shape.head_dim)
        self.rotate_values = rotate_values
        self.heads = (shape.n_head, shape.n_kv_head, shape.n_kv_head)  # of q, k, v
        self.qkv = linear(shape.d_model, sum(self.heads) * shape.head_dim, shape.initial.hidden(shape.d_model))
        inner = shape.n_head * shape.head_dim
        self.out = linear(inner, shape.d_model, shape.initial.residual(inner))
        # One gain per channel, shared by the heads, as in the published models that use QK-norm.
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if qk_norm else None
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.constant_(norm.weight, qk_gain)
        self.forget = forget_gate(forgetting, forget_bias, shape)
        self.head_gate = HeadGate(shape) if head_gate else None
        self.value_residual = ValueResidual(shape) if value_residual else None

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """y_i = sum_j softmax(q_i . k_j / sqrt(Dh)) v_j, per head, then W_o."""
        turns: Turns = self.frequencies(context)
        if self._only_turns() and context.record is None:
            q_turned, k_turned, v = rotated_heads(x, self.qkv, self.heads, *turns.queries)
        else:
            q, k, v = split_heads(self.qkv(x), sum(self.heads)).split(self.heads, dim=1)
            if self.q_norm is not None and self.k_norm is not None:
                wide = torch.promote_types(v.dtype, torch.float32)  # norms are fp32 or better
                q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
            q_turned, k_turned = self.place(q, k, turns, context)
        if self.value_residual is not None:
            v = self.value_residual(v, context)
        own = v  # the query tokens' own values, in their own frame
        v_turned = rotate(v, *turns.keys) if self.rotate_values else v
        if context.cache is not None:
            k_turned, v_turned, _ = context.cache.append(k_turned, v_turned)

        forgotten = None if self.forget is None else self.forget.forgotten(x, context)
        if forgotten is None:
            bias = self.bias(x, k_turned.shape[2], context)
            v_bar = self._attend(q_turned, k_turned, v_turned, context.documents, bias)
        else:
            bias = None if context.record is None else fading(forgotten, x.shape[1])
            v_bar = self._attend_fading(q_turned, k_turned, v_turned, context.documents, forgotten)
        if self.rotate_values:
            v_bar = rotate(v_bar, *turns.queries, inverse=True)
        update = self.combine(v_bar, own)
        if context.record is not None:
            weights, log_evidence = attention_weights(q_turned, k_turned, context.documents, bias)
            context.record.update(q=q, k=k, v=own, v_bar=v_bar, update=update, **turns.recorded())
            context.record.update(weights=weights, log_evidence=log_evidence)
        if self.head_gate is not None:
            update = update * self.head_gate(x).transpose(1, 2).unsqueeze(-1)
        return self.out(update.transpose(1, 2).flatten(-2))

    def _only_turns(self) -> bool:
        """Whether nothing but one rotation of all heads lies between the projection and the product."""
        shared = self.q_norm is None and self.frequencies.kind == "shared"
        return shared and type(self).place is StandardAttention.place

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys after position encoding, ready for the dot product."""
        return rotate(q, *turns.queries), rotate(k, *turns.keys)

    def bias(self, x: Tensor, keys: int, context: TokenContext) -> Tensor | None:
        """The bias added to the logits before the softmax, (1 or B, H, T, keys)."""
        return None

    def combine(self, v_bar: Tensor, own: Tensor) -> Tensor:
        """The output of the heads, from the aggregated values (B, H, T, Dh) and the tokens' own (B, G, T, Dh)."""
        return v_bar

    def constant_precision(self, device: torch.device) -> DirectionalNoise:
        """The precision for which robust attention with the exponential kernel of -2 q.k equals softmax attention."""
        one = torch.ones(self.shape.n_head, device=device)
        return DirectionalNoise(0 * one, 0 * one, 0 * one, one, 0 * one, tau=one * 4 * self.shape.head_dim**-0.5)

    def _attend_fading(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, forgotten: Tensor) -> Tensor:
        """Softmax attention with forget gates; memory grows linearly with the number of tokens."""
        call = RobustCall(
            q,
            k,
            v,
            self.constant_precision(q.device),
            "exponential",
            residual_form="dot",
            constant=True,
            forgotten=forgotten,
            documents=documents,
            dropout=self.shape.dropout if self.training else 0.0,
        )
        return robust_attention(call, self.backend).v_bar

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, bias: Tensor | None) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        causal = documents is None and queries == keys and bias is None
        # A single query sees everything; several queries on a longer cache, or documents, need an explicit mask.
        mask = None if causal or queries == 1 else _mask(queries, keys, documents, q.device)
        if bias is not None:
            mask = (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(q.dtype)
        grouped = q.shape[1] != k.shape[1]
        if grouped and mask is not None and q.is_cuda:  # no fused kernel takes both; the unfused one holds all pairs
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=self.shape.dropout if self.training else 0.0,
            enable_gqa=grouped,
        )

    def flops_per_token(self, context: int) -> int:
        """Projections, then one product with the keys and one with the values."""
        s = self.shape
        projections = 2 * (self.qkv.weight.numel() + self.out.weight.numel())
        projections += self.head_gate.flops_per_token() if self.head_gate is not None else 0
        projections += self.forget.flops_per_token(mean_visible(context)) if self.forget is not None else 0
        return projections + int(4 * mean_visible(context) * s.n_head * s.head_dim)


def attention_weights(
    q: Tensor, k: Tensor, documents: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights (B, H, T, S) and log-normaliser (B, H, T) that the fused kernel does not give out; for records only."""
    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):  # which would round the product to bf16 again
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        scores = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~_mask(q.shape[2], k.shape[2], documents, q.device), float("-inf"))
    log_evidence = torch.logsumexp(scores, dim=-1)
    return (scores - log_evidence.unsqueeze(-1)).exp(), log_evidence


def _mask(queries: int, keys: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """The causal mask with an axis for the heads, (1, T, S) or (B, 1, T, S)."""
    return causal_mask(queries, keys, documents, device).unsqueeze(-3)
