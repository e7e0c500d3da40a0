"""Appendix G.1 in attention: the exact angular residual, and the gate that weighs values outside the soft-max.

κ_ij g_ij = ρ_ij m̂_i m̂_ij + (τ_ij − ρ_ij) m̂_ij² c_ij with c_ij = û_ij†û_i. The soft-max keeps its normaliser Σwκ and
κ its floors; the gate is derived without them (docs/theory.md E34), so at consensus it is 1 only for m∞ = 0.
Shapes as in call.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.geometry.precision import MIN_MAGNITUDE, carried_magnitude, log_rho

from .call import RobustCall

SMALL = 1e-6  # keeps directions of zero vectors finite


def angular_residual(call: RobustCall, q: Tensor, k: Tensor) -> Tensor:
    """‖q‖‖k‖(1 − |c|²) (B,H,T,S), what the exact tangential likelihood has instead of ‖q − k‖²."""
    real, imaginary = _cosine(call, q, k)
    squared = real.square() if imaginary is None else real.square() + imaginary.square()
    return q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :] * (1 - squared).clamp_min(0)


def quarter_back(x: Tensor) -> Tensor:
    """−i x of real vectors (..., Dh) whose halves are real and imaginary parts; x·(−i y) is Im x†y."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((imaginary, -real), dim=-1)


def gated_weights(
    call: RobustCall,
    log_weights: Tensor,
    kappa: Tensor,
    tau: Tensor,
    lag: Tensor,
    age: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """A g (B,H,T,S), real and imaginary part (None in real geometry), from log A, log κ, log τ and age μΔ.

    With A/κ = w/P, A g = (w m̂_ij/P)(ρ m̂_i + (τ − ρ) m̂_ij c): the gate itself, which grows with the lag, is not formed.
    """
    noise, magnitude = call.radial, call.magnitude
    assert noise is not None and magnitude is not None, "RobustCall.check sees to it"
    dtype, queries = log_weights.dtype, q.shape[2]
    m = magnitude.to(dtype).clamp_min(MIN_MAGNITUDE)
    own, others = m[:, None, -queries:, None], m[:, None, None, :]
    if call.equilibrium is None:
        carried = others.log() - age
    else:
        carried = carried_magnitude(others, age, 1.0, call.equilibrium.to(dtype)).log()
    rho = log_rho(lag, mu=noise.mu.to(dtype), eta_k2=noise.eta_k2.to(dtype), sigma02=noise.sigma02.to(dtype)).exp()
    shared = (log_weights - kappa + carried).exp()
    correlated = (tau.exp() - rho) * carried.exp()
    real, imaginary = (1.0, None) if call.radial_correlation == "one" else _cosine(call, *_correlated(call, q, k, v))
    return shared * (rho * own + correlated * real), None if imaginary is None else shared * correlated * imaginary


def _correlated(call: RobustCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Whose directions the gate compares: the query's, and its keys'."""
    return (v[:, :, -q.shape[2] :], v) if call.radial_correlation == "vv" else (q, k)


def _cosine(call: RobustCall, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None]:
    """c_ij = û_ij†û_i per head, real and (where asked for) imaginary part."""
    own, others = (F.normalize(x, dim=-1, eps=SMALL) for x in (own, others))
    imaginary = -(own @ quarter_back(others).mT) if call.consensus == "complex" else None
    return own @ others.mT, imaginary
