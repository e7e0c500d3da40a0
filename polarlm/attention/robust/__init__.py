"""Robust attention in plain torch: `reference` follows the equations, `streaming` needs less memory.

polarlm/fast has faster backends with the same results.
"""

from __future__ import annotations

import torch

from polarlm.errors import UserError
from polarlm.operations import operation

from .call import (
    CONSENSUS,
    KERNELS,
    PLAIN_KERNELS,
    RADIAL_CORRELATIONS,
    RESIDUAL_FORMS,
    AttentionOutput,
    DirectionalNoise,
    RadialNoise,
    RobustCall,
)
from .reference import reference_attention
from .streaming import streaming_attention, streaming_obstacle

__all__ = [
    "CONSENSUS",
    "KERNELS",
    "PLAIN_KERNELS",
    "RADIAL_CORRELATIONS",
    "RESIDUAL_FORMS",
    "AttentionOutput",
    "DirectionalNoise",
    "RadialNoise",
    "RobustCall",
    "reference_attention",
    "robust_attention",
    "streaming_attention",
    "streaming_obstacle",
]


PLAIN_BACKENDS = ("reference", "streaming")


@operation
def robust_attention(call: RobustCall, backend: str = "auto") -> AttentionOutput:
    """Compute the call with the named backend; `auto` keeps memory linear unless the weights are asked for."""
    if backend not in ("auto", *PLAIN_BACKENDS):
        raise UserError(
            f"block.backend is {backend!r}; without polarlm/fast it must be one of auto, {', '.join(PLAIN_BACKENDS)}."
        )
    call.check()
    obstacle = streaming_obstacle(call)
    if backend == "streaming" and obstacle:
        raise UserError(f"block.backend=streaming cannot do this: {obstacle}. Use block.backend=auto.")
    with torch.autocast(call.q.device.type, enabled=False):
        materialised = backend == "reference" or obstacle or not call.q.numel()
        return reference_attention(call) if materialised else streaming_attention(call)
