"""Robust attention by torch's FlexAttention: the logits as a score_mod with captured tensors, fused by torch itself.

For GPUs on which the Triton kernels are unproven. The fused kernel and its backward pass are torch.compile's; on a CPU
torch evaluates the same score_mod unfused and forward only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from polarlm.attention.robust.call import AttentionOutput, RobustCall
from polarlm.attention.robust.streaming import streaming_radial
from polarlm.geometry.precision import MAX_QUERY_PRECISION, MIN_MAGNITUDE


def flex_obstacle(call: RobustCall) -> str | None:
    """Why FlexAttention cannot do this call, or None."""
    if call.q.dtype == torch.float64 and call.q.device.type != "cpu":
        return "its kernels do not take float64"
    if call.only_plain is not None:
        return call.only_plain
    if call.dropout > 0:
        return "it does not drop weights (dropout > 0)"
    if call.decay_values:
        return "a score_mod changes logits, and decaying values (block.decay_values=true) comes after the soft-max"
    if call.radial_mode == "shared":
        return "it never has the weights of all heads together, as block/radial=shared needs"
    if not call.bounded:
        return "without a noise floor (sigma_t0 = 0) precision grows with the lag beyond what its fp32 logits hold"
    if call.q.shape[2] != call.k.shape[2]:
        return "it would be compiled anew for every number of cached keys"
    learns = any(x.requires_grad for x in (call.q, call.k, call.v)) and torch.is_grad_enabled()
    if call.q.device.type != "cuda" and learns:
        return f"FlexAttention has no backward pass on {call.q.device.type}"
    if learns and torch.are_deterministic_algorithms_enabled():
        return "it adds gradients of noise and forgetting in no fixed order (trainer.deterministic=true)"
    return None


def flex_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention by FlexAttention; limits in `flex_obstacle`."""
    from torch.nn.attention.flex_attention import AuxRequest

    mask = _block_mask(call.documents, call.q.shape[0], call.q.shape[2], str(call.q.device))
    if not torch.is_grad_enabled():  # a CPU refuses inputs that could want a gradient, wanted or not
        call = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
    v_bar, extra = _function(call.q.is_cuda)(
        call.q,
        call.k,
        call.v,
        score_mod=logits(call),
        block_mask=mask,
        scale=1.0,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    m_bar = streaming_radial(call) if call.radial_mode == "own" else None
    return AttentionOutput(v_bar, extra.lse, m_bar)


def logits(call: RobustCall) -> Callable[..., Tensor]:
    """L = log κ + log w(x) of a pair as a function of q·k and the pair's place; symbols as in reference.py.

    FlexAttention asks of a tensor that wants a gradient that a score_mod indexes it once, and uses it: what queries and
    keys read are two tensors, and one that has no effect is not touched.
    """
    dtype, noise, half = call.score_dtype, call.noise, call.half
    q2, k2 = (x.to(dtype).square().sum(-1) for x in (call.q, call.k))  # (B,H,T), (B,G,T)
    magnitude = call.magnitude
    m2 = torch.ones_like(k2[:, 0]) if magnitude is None else magnitude.to(dtype).clamp_min(MIN_MAGNITUDE).square()
    mu, eta_k2, eta_q2, sigma02, m_inf2, process2, shape = noise.rows(call.kernel, dtype).unbind()
    group = call.q.shape[1] // call.k.shape[1]
    forgotten = None if call.forgotten is None else call.forgotten.to(dtype)
    remembered = None if forgotten is None else -forgotten
    kernel, full, decays = call.kernel, call.residual_form == "full", call.decay_keys

    def score_mod(dot: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        decay = torch.exp(-mu[h] * (i - j).clamp_min(0).to(dtype))
        decay2 = decay * decay
        variance = eta_k2[h] * decay2 + sigma02[h] + process2[h] * (1 - decay2)
        numerator = m2[b, j] * decay2 + m_inf2[h] if magnitude is not None else torch.ones_like(decay)
        log_kappa = torch.log(numerator) - torch.log(variance)
        if forgotten is not None and remembered is not None:
            log_kappa = log_kappa + forgotten[b, h, i] + remembered[b, h, j]
        if kernel == "gaussian":
            return log_kappa + 0 * dot
        precision = (numerator / (variance + eta_q2[h])).clamp_max(MAX_QUERY_PRECISION)
        key_decay = decay if decays else torch.ones_like(decay)
        residual = -2 * key_decay * dot
        if full:
            residual = (q2[b, h, i] + key_decay * key_decay * k2[b, h // group, j] + residual).clamp_min(0)
        x, nu = precision * residual / half, shape[h]
        if kernel == "student":
            return log_kappa - (nu + 1) * torch.log1p(x / nu)
        return log_kappa - x / nu

    return score_mod


@functools.cache
def _function(compiled: bool) -> Callable[..., Any]:
    """FlexAttention, fused where there is a GPU: unfused it would hold all pairs."""
    from torch.nn.attention.flex_attention import flex_attention as function

    return cast(Callable[..., Any], torch.compile(function, dynamic=False) if compiled else function)


def _block_mask(documents: Tensor | None, batch: int, tokens: int, device: str) -> Any:
    if documents is None:
        return _causal(tokens, device)
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    return create_block_mask(seen, batch, None, tokens, tokens, device=device)


@functools.lru_cache(maxsize=64)
def _causal(tokens: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=device)
