"""Content-dependent forget gates: every token sets, per head, the share of earlier evidence that is kept.

The gate is lambda_t = sigmoid(w_h . x_t + b_h). The weight of a key at j for a query at i is multiplied by
lambda_{j+1} ... lambda_i: the memory of a filter whose state may change abruptly (docs/theory.md). The code adds log
lambda.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.estimator import Value, choice, per_head
from polarlm.attention.mixer import MixerShape, TokenContext, mean_visible
from polarlm.attention.parts.part import Part

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

FORGETTING = ("none", "constant", "content")  # constant: lambda is a learned number of the head, w = 0
FORGOTTEN = "forgotten"  # where a cache keeps the running sums of log lambda
PAIR_FLOPS = 2  # of one difference of sums and its exponential, per pair and head


class ForgetGate(nn.Module):
    """log lambda of every head. Not a linear map of the stream, so Muon leaves it to AdamW.

    A mixer that reads the raw stream has it normalised.
    """

    def __init__(self, shape: MixerShape, kind: str, bias: Value, *, raw_stream: bool = False) -> None:
        super().__init__()
        size = (shape.n_head, shape.d_model)
        drawn = torch.randn(size) * shape.initial.hidden(shape.d_model) if kind == "content" else None
        self.weight = None if drawn is None else nn.Parameter(drawn)
        self.offset = nn.Parameter(per_head("forget_bias", bias, shape.n_head).float())
        self.eps = shape.norm_eps if raw_stream else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, H, T), in fp32 or better: sums over many tokens are taken of it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.eps is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        with torch.autocast(x.device.type, enabled=False):
            offset = self.offset.to(wide)
            if self.weight is None:
                return F.logsigmoid(offset)[:, None].expand(x.shape[0], -1, x.shape[1])
            return F.logsigmoid(F.linear(x.to(wide), self.weight.to(wide), offset)).transpose(1, 2)

    def forgotten(self, x: Tensor, context: TokenContext) -> Tensor:
        """Running sums of log lambda of the tokens x and of those in the cache, (B, H, S); the cache takes them."""
        log_forget = self(x)
        if context.record is not None:
            context.record["log_forget"] = log_forget
        sums = running_sum(log_forget, -1)
        if context.cache is None:
            return sums
        seen = context.cache.running.get(FORGOTTEN)
        if seen is not None:
            sums = torch.cat([seen.to(sums.dtype), sums + seen[..., -1:].to(sums.dtype)], dim=-1)
        context.cache.running[FORGOTTEN] = sums
        return sums

    def flops_per_token(self, visible: float) -> int:
        """The gate's rows, and what is done to the `visible` pairs of a token."""
        rows = 0 if self.weight is None else 2 * self.weight.numel()
        return rows + int(PAIR_FLOPS * visible * len(self.offset))


def running_sum(x: Tensor, axis: int) -> Tensor:
    """Inclusive running sums; where deterministic algorithms are asked for also on a GPU, whose cumsum is not one."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(axis)
    x, distance = x.transpose(axis, -1), 1
    while distance < x.shape[-1]:  # sums over 2, 4, 8, ... tokens
        x, distance = x + F.pad(x[..., :-distance], (distance, 0)), 2 * distance
    return x.transpose(axis, -1)


def forget_gate(kind: str, bias: Value, shape: MixerShape, *, raw_stream: bool = False) -> ForgetGate | None:
    """The gate that `block.forgetting` names."""
    if choice("forgetting", kind, FORGETTING) == "none":
        return None
    return ForgetGate(shape, kind, bias, raw_stream=raw_stream)


def fading(forgotten: Tensor, queries: int) -> Tensor:
    """log of what a key still counts for each of the last `queries` tokens, (B, H, T, S); no meaning in the future."""
    return forgotten[..., -queries:, None] - forgotten[..., None, :]


class Forgetting(Part):
    """The forget gates of a polar block."""

    def __init__(self, block: PolarAttention, *, forgetting: str, forget_bias: Value) -> None:
        super().__init__(block)
        self.forgetting, self.forget_bias = forgetting, forget_bias
        block.forget = forget_gate(forgetting, forget_bias, block.shape, raw_stream=not block.pre_norm)

    def __call__(self, x: Tensor, context: TokenContext) -> Tensor | None:
        """Running sums of log lambda (B, H, S), where anything is forgotten."""
        return None if self.block.forget is None else self.block.forget.forgotten(x, context)

    def unused(self) -> set[str]:
        """No gate has no bias."""
        return {"forget_bias"} if self.forgetting == "none" else set()

    def flops_per_token(self, context: int) -> int:
        """The gate once per token, its pairs once per reweighting."""
        if self.block.forget is None:
            return 0
        forgotten: int = self.block.forget.flops_per_token(
            self.block.parts.influence.irls_steps * mean_visible(context)
        )
        return forgotten
