"""Robust attention: one function, several backends that give the same numbers.

`reference` writes the mathematics down; every other backend is tested against it on outputs and gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.errors import UserError

from .noise import AttentionOutput, DirectionalNoise, RadialNoise, check_residual_form
from .reduction import reduced_attention, reducible
from .reference import reference_attention
from .streaming import streaming_attention
from .triton_backend import triton_attention, triton_obstacle

__all__ = [
    "BACKENDS",
    "KERNELS",
    "AttentionOutput",
    "DirectionalNoise",
    "RadialNoise",
    "check_residual_form",
    "robust_attention",
]

BACKENDS = ("auto", "reference", "streaming", "triton")
KERNELS = ("student", "exponential", "gaussian")
RADIAL_MODES = ("off", "own", "shared")


def robust_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    *,
    kernel: str,
    decay_keys: bool = False,
    decay_values: bool = False,
    radial: RadialNoise | None = None,
    radial_mode: str = "off",
    documents: Tensor | None = None,
    backend: str = "auto",
    dropout: float = 0.0,
    return_weights: bool = False,
    residual_form: str = "full",
) -> AttentionOutput:
    """Causal robust attention of q (B,H,T,Dh) over k, v (B,G,S,Dh) and magnitude (B,S); queries are the last T of S.

    Scores are formed in fp32 (fp64 for fp64 inputs) also under autocast. `documents` (B,S) holds document ids that
    attention must not cross. `dropout` acts on the weights and leaves the log-evidence alone. `residual_form` dot keeps
    −2 q·k of the residual ‖q−k‖²: ordinary attention's logits, for the exponential kernel.
    """
    _check(q, k, v, magnitude, noise, kernel, radial, radial_mode, documents, backend)
    check_residual_form(residual_form, kernel)
    options = dict(
        kernel=kernel,
        decay_keys=decay_keys,
        decay_values=decay_values,
        radial=radial,
        radial_mode=radial_mode,
        documents=documents,
    )
    streamable = obstacle_to_streaming(return_weights, radial_mode, decay_values, residual_form)
    fusable = streamable if return_weights or residual_form == "dot" else triton_obstacle(q, dropout, radial_mode)
    if not q.numel():
        backend = "reference"  # the fast ways divide by the length, torch's own in C
    with torch.autocast(q.device.type, enabled=False):
        if backend == "auto":
            asked = return_weights or radial_mode == "shared"  # for weights, which torch's kernel keeps to itself
            if not asked and reducible(q, k, noise, kernel, documents, dropout):
                own = radial if radial_mode == "own" else None
                return reduced_attention(q, k, v, magnitude, noise, own, residual_form)
            fast = "triton" if fusable is None and q.is_cuda else "streaming"
            # One query (decoding) has S weights in all: preparing to stream them would cost more than they do.
            backend = "reference" if streamable or q.shape[2] == 1 else fast
        if backend == "reference":
            options |= dict(dropout=dropout, return_weights=return_weights, residual_form=residual_form)
            return reference_attention(q, k, v, magnitude, noise, **options)
        obstacle = fusable if backend == "triton" else streamable
        if obstacle:
            raise UserError(f"block.backend={backend} cannot do this: {obstacle}. Use block.backend=auto.")
        if backend == "triton":
            return triton_attention(q, k, v, magnitude, noise, dropout=dropout, **options)
        return streaming_attention(q, k, v, magnitude, noise, dropout=dropout, **options)


def obstacle_to_streaming(
    return_weights: bool, radial_mode: str, decay_values: bool, residual_form: str = "full"
) -> str | None:
    """Why the streaming backend cannot take a call, or None."""
    if return_weights:
        return "it never holds the weights that were asked for"
    if radial_mode == "shared" and decay_values:
        return "it does not combine block.radial=shared with decaying values"
    if residual_form == "dot":
        return "it only knows block.residual_form=full"
    return None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    kernel: str,
    radial: RadialNoise | None,
    radial_mode: str,
    documents: Tensor | None,
    backend: str,
) -> None:
    for key, value, allowed in (
        ("kernel", kernel, KERNELS),
        ("radial", radial_mode, RADIAL_MODES),
        ("backend", backend, BACKENDS),
    ):
        if value not in allowed:
            raise UserError(f"block.{key} is {value!r}; it must be one of {', '.join(allowed)}.")
    if kernel == "student" and noise.nu is None:
        raise UserError("block.kernel=student needs nu_t; set block.nu_t or choose another kernel.")
    if kernel == "exponential" and noise.tau is None:
        raise UserError("block.kernel=exponential needs tau; set block.tau or choose another kernel.")
    if radial_mode != "off" and (radial is None or magnitude is None):
        raise ValueError(f"radial_mode={radial_mode!r} needs both the radial noise and the magnitude.")
    if q.shape[1] % k.shape[1] or k.shape != v.shape or q.shape[2] > k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)} must be (B,H,T,Dh), k {tuple(k.shape)} and v {tuple(v.shape)} both (B,G,S,Dh) "
            "with G dividing H and T ≤ S."
        )
    if documents is not None and documents.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"documents {tuple(documents.shape)} must be (B,S) = {(k.shape[0], k.shape[2])}.")
