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

from polarlm.geometry.precision import MAX_QUERY_PRECISION, log_kappa, log_kappa_tilde

from .call import AttentionOutput, RobustCall
from .streaming_radial import radial_estimate


def reduction_obstacle(call: RobustCall) -> str | None:
    """Why the call is no ordinary attention that torch's CPU kernel could take, or None."""
    if call.kernel != "exponential":
        return "its kernel is not exponential"
    if call.return_weights or call.radial_mode == "shared":
        return "it needs the weights, which torch's kernel keeps to itself"
    if call.q.device.type != "cpu" or call.documents is not None or call.dropout:
        return "it needs a CPU, one document per row, and no dropout"
    mu = call.noise.mu
    if mu.requires_grad or torch.compiler.is_compiling():  # reading μ would break the graph
        return "its decay is learned or not known yet"
    if call.q.shape[2] not in (1, call.k.shape[2]) or mu.any():
        return "precision decays, or several queries continue a cache"
    return None


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


def reduced_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention with the exponential kernel at μ = 0, by one call of torch's own attention."""
    dtype, noise = call.score_dtype, call.noise
    (_, heads, _, size), groups = call.q.shape, call.k.shape[1]
    Q = call.q.to(dtype)
    K, V = (x.to(dtype).repeat_interleave(heads // groups, dim=1) for x in (call.k, call.v))

    def per_head(x: Tensor) -> Tensor:
        return x.to(dtype)[:, None]

    # E = 1: every lag is like lag 0, and RFA's σ̃²(1−E²) vanishes.
    here = torch.zeros((), dtype=dtype)
    m = None if call.magnitude is None else call.magnitude.to(dtype)[:, None]  # (B,1,S)
    shared = dict(eta_k2=per_head(noise.eta_k2), sigma02=per_head(noise.sigma02), m_inf2=per_head(noise.m_inf2))
    kappa = log_kappa(m, here, mu=0.0, **shared)  # (B or 1, H, S or 1)
    kappa_tilde = log_kappa_tilde(m, here, mu=0.0, eta_q2=per_head(noise.eta_q2), **shared)
    kappa_tilde = kappa_tilde.clamp_max(math.log(MAX_QUERY_PRECISION))
    slope = kappa_tilde.exp() / (per_head(noise.shape(call.kernel)) * call.half)  # c_j
    one, full = torch.ones_like(Q[..., :1]), call.residual_form == "full"
    bias = kappa - slope * K.square().sum(-1) * full  # (B,H,S)
    wide_q = torch.cat([Q, Q.square().sum(-1, keepdim=True) * full, one], -1)
    wide_k = torch.cat([2 * slope[..., None] * K, -slope.expand_as(bias)[..., None], bias[..., None]], -1)
    padding = -wide_q.shape[-1] % 8  # whole vectors for the kernel's loops
    wide_v = F.pad(V, (0, 2 + padding))
    wide_v = torch.cat([wide_v[..., :-1], torch.ones_like(wide_v[..., :1])], -1)
    out, log_evidence = _CausalAttention.apply(F.pad(wide_q, (0, padding)), F.pad(wide_k, (0, padding)), wide_v)
    return AttentionOutput(out[..., :size].to(call.v.dtype), log_evidence, radial_estimate(call))
