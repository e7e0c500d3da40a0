"""Where robust attention is ordinary attention in disguise, use the ordinary kernel, exactly.

With the exponential kernel and no decay κ_j and κ̃_j depend on the key alone, so with c_j = κ̃_j/(d_h τ)
    L_ij = log κ_j − c_j (‖q_i‖² + ‖k_j‖² − 2 q_i·k_j) = [q_i, ‖q_i‖², 1] · [2c_j k_j, −c_j, log κ_j − c_j‖k_j‖²]
is a dot product with two extra channels; residual_form=dot drops the two norms. A value channel of ones carries the
gradient of the log-evidence: the backward kernel forms ∂L = A(∂A − δ) with δ = Σ ∂O·O, and putting ∂ℓ and 0 into
that channel of ∂O and O adds A·∂ℓ.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import MAX_QUERY_PRECISION, MIN_MAGNITUDE, AttentionOutput, DirectionalNoise, RadialNoise
from .reference import log_or_minus_infinity
from .streaming_radial import radial_estimate


def reducible(q: Tensor, k: Tensor, noise: DirectionalNoise, kernel: str, documents, dropout: float) -> bool:
    """Whether the logits are a dot product and torch's CPU kernel can take the call."""
    if kernel != "exponential" or q.device.type != "cpu" or documents is not None or dropout:
        return False
    if noise.mu.requires_grad or torch.compiler.is_compiling():  # reading μ would break the graph
        return False
    return q.shape[2] in (1, k.shape[2]) and not noise.mu.any()


class _CausalAttention(torch.autograd.Function):
    """softmax(QKᵀ)V and its log-normaliser, both differentiable; the last channel of V must be ones."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.causal = q.shape[2] > 1
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, ctx.causal, scale=1.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out[..., :-1], lse

    @staticmethod
    def backward(ctx, d_out: Tensor, d_lse: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.cat([d_out, d_lse[..., None].to(d_out.dtype)], -1)
        out = torch.cat([out[..., :-1], torch.zeros_like(out[..., -1:])], -1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, ctx.causal, scale=1.0
        )


def reduced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    radial: RadialNoise | None,
    residual_form: str = "full",
) -> AttentionOutput:
    """Robust attention with the exponential kernel at μ = 0, by one call of torch's own attention."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    (_, heads, queries, size), groups = q.shape, k.shape[1]
    Q = q.to(dtype)
    K, V = (x.to(dtype).repeat_interleave(heads // groups, dim=1) for x in (k, v))

    def per_head(x: Tensor) -> Tensor:
        return x.to(dtype)[:, None]

    variance = per_head(noise.eta_k2) + per_head(noise.sigma02)  # E = 1, so RFA's σ̃²(1−E²) vanishes
    log_numerator = torch.zeros((), dtype=dtype)
    if magnitude is not None:
        log_m2 = 2 * magnitude.to(dtype).clamp_min(MIN_MAGNITUDE).log()[:, None]
        log_numerator = torch.logaddexp(log_m2, log_or_minus_infinity(per_head(noise.m_inf2)))
    log_kappa = log_numerator - variance.log()  # (B or 1, H, S or 1)
    log_query = (log_numerator - (variance + per_head(noise.eta_q2)).log()).clamp_max(math.log(MAX_QUERY_PRECISION))
    slope = log_query.exp() / (per_head(noise.tau) * size / 2)  # c_j
    one, full = torch.ones_like(Q[..., :1]), residual_form == "full"
    bias = log_kappa - slope * K.square().sum(-1) * full  # (B,H,S)
    wide_q = torch.cat([Q, Q.square().sum(-1, keepdim=True) * full, one], -1)
    wide_k = torch.cat([2 * slope[..., None] * K, -slope.expand_as(bias)[..., None], bias[..., None]], -1)
    padding = -wide_q.shape[-1] % 8  # whole vectors for the kernel's loops
    wide_v = F.pad(V, (0, 2 + padding))
    wide_v = torch.cat([wide_v[..., :-1], torch.ones_like(wide_v[..., :1])], -1)
    out, log_evidence = _CausalAttention.apply(F.pad(wide_q, (0, padding)), F.pad(wide_k, (0, padding)), wide_v)
    m_bar = None if radial is None else radial_estimate(v, magnitude, radial, None, queries)
    return AttentionOutput(out[..., :size].to(v.dtype), log_evidence, m_bar)
