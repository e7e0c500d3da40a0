"""Precision carried from layer to layer (Appendix G.3), in the log domain as evidence always is here.

Prior P- and attention's evidence P_attn (both per head) meet by covariance intersection, which stays conservative
without knowing how the two are correlated; w in [0, 1] is the prior's share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.geometry.multihead import project_evidence

Scalar = float | Tensor


def covariance_intersection(log_prior: Tensor, log_evidence: Tensor, prior_share: Scalar) -> tuple[Tensor, Tensor]:
    """log P+ with P+ = w P- + (1-w) P_attn, and the step alpha = (1-w) P_attn / P+ of u+ = u + alpha (u_bar - u)."""
    share = torch.as_tensor(prior_share, dtype=log_prior.dtype, device=log_prior.device)
    from_attention = log_evidence + torch.log1p(-share)
    log_posterior = torch.logaddexp(log_prior + share.log(), from_attention)
    return log_posterior, (from_attention - log_posterior).exp()


def fused_update(v: Tensor, v_bar: Tensor, log_prior: Tensor, log_evidence: Tensor, prior_share: Scalar) -> Tensor:
    """The tangent update that fuses prior and attention: v, v_bar (..., H, Dh), precisions (..., H).

    min_Delta sum_h w P-_h |Delta_h|^2 + (1-w) P_h |Delta_h - delta_h|^2 with <v, Delta> = 0 completes the square to
    sum_h P+_h |Delta_h - alpha_h delta_h|^2: Prop. 5 with alpha_h delta_h and P+_h (docs/theory.md E32).
    """
    log_posterior, alpha = covariance_intersection(log_prior, log_evidence, prior_share)
    return project_evidence(v, torch.lerp(v, v_bar, alpha.unsqueeze(-1)), log_posterior)


def carry_to_next_layer(log_posterior: Tensor, a: Scalar, b: Scalar) -> Tensor:
    """log P- of the next layer: P- = 1 / (a/P+ + b); b > 0 forgets, a > 1 distrusts."""
    return -torch.logaddexp(_log(a, log_posterior) - log_posterior, _log(b, log_posterior))


def log_kappa_tilde_of_uncertain_query(log_kappa_tilde: Tensor, log_prior: Tensor, c: Scalar) -> Tensor:
    """1/kappa_eff = 1/kappa_tilde + c/P-: a query that is unsure of itself asks more gently.

    In variances this is eta_q^2 + c m^2/P-. The printed eta_q^2 + c/P- adds an angle to a length (docs/theory.md E33).
    """
    return widened(log_kappa_tilde, _log(c, log_prior) - log_prior)


def widened(log_precision: Tensor, log_variance: Tensor) -> Tensor:
    """log of 1 / (1/precision + variance)."""
    return -torch.logaddexp(-log_precision, log_variance)


def _log(value: Scalar, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).log()
