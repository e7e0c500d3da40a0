"""Robust attention in plain torch with memory O(N·chunk): the reference on chunks of queries.

Chunks are recomputed in the backward pass. For devices without kernels and machines without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .call import NO_WEIGHTS, AttentionOutput, RobustCall
from .reference import radial_estimate, reference_attention

CHUNK = 128  # queries at a time
# Up to so many pairs, 20 to 60 MB of intermediates are kept: forming them again would take half as long again.
KEPT = 2**19


def streaming_obstacle(call: RobustCall) -> str | None:
    """Why the streaming backend cannot take a call, or None."""
    return NO_WEIGHTS if call.return_weights else None


def streaming_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention, chunk by chunk."""

    def estimate(part: RobustCall) -> tuple[Tensor | None, ...]:
        result = reference_attention(part)
        return result.v_bar, result.log_evidence, result.m_bar, result.gate

    v_bar, log_evidence, m_bar, gate = zip(*_chunks(call, estimate))
    radial = None if call.radial_mode == "off" else torch.cat(m_bar, dim=-1)
    gates = None if call.consensus == "none" else torch.cat(gate, dim=-1)
    return AttentionOutput(torch.cat(v_bar, dim=-2), torch.cat(log_evidence, dim=-1), radial, gates)


def streaming_radial(call: RobustCall) -> Tensor:
    """m̄ (B,T) of a call whose radial weights are its own, for backends that leave it to torch."""
    return torch.cat(list(_chunks(call, radial_estimate)), dim=-1)


def _chunks(call: RobustCall, function: Callable):
    """`function` of the call for CHUNK queries after the other, each over the keys it can see."""
    batch, heads, queries, keys = *call.q.shape[:3], call.k.shape[2]
    if queries <= CHUNK and batch * heads * queries * keys <= KEPT:
        yield function(call)
        return
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        seen = keys - queries + stop
        part = replace(
            call,
            q=call.q[:, :, start:stop],
            k=call.k[:, :, :seen],
            v=call.v[:, :, :seen],
            magnitude=None if call.magnitude is None else call.magnitude[:, :seen],
            documents=None if call.documents is None else call.documents[:, :seen],
            forgotten=None if call.forgotten is None else call.forgotten[..., :seen],
            log_query_variance=None if call.log_query_variance is None else call.log_query_variance[..., start:stop],
            log_key_variance=None if call.log_key_variance is None else call.log_key_variance[..., :seen],
        )
        yield checkpoint(function, part, use_reentrant=False, preserve_rng_state=call.dropout > 0)
