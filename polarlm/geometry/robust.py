"""Robust influence: penalties rho(s), weights w = rho'(s), and the weights they give observations (App. C.2.1).

s is a squared Mahalanobis distance over `dim` degrees of freedom. The paper counts complex modes, dim = D/2, and so do
we (a Gaussian residual then has s/dim near 2). Student-t takes nu = nu_t * dim: the Polar Transformer's nu_t is nu/dim.

    gaussian      rho = s                                 w = 1
    exponential   rho = tau*d (1 - exp(-s/(tau*d)))       w = exp(-s/(tau*d))
    student       rho = d [1 - (1 + s/nu)^(-nu/d)]        w = (1 + s/nu)^(-(nu+d)/d)
    student_mle   rho = nu log(1 + s/nu)                  w = 1/(1 + s/nu)

`student` is the paper's, and what its logits use: the weight is a power of the Student-t density. It is not the weight
that maximising a Student-t likelihood gives; that one is `student_mle`, which discards far less of an honest
observation (tests/geometry/test_influence.py; docs/rt_filter.md has the difference in degrees).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["gaussian", "exponential", "student", "student_mle"]
KERNELS: tuple[str, ...] = ("gaussian", "exponential", "student", "student_mle")


def log_influence(
    s: Tensor, kernel: Kernel, *, dim: float, nu_t: float | Tensor = 4.0, tau: float | Tensor = 1.0
) -> Tensor:
    """log w(s) of the named kernel; nu_t = nu/dim is used by student, tau by exponential."""
    if kernel == "gaussian":
        return torch.zeros_like(s)
    if kernel == "exponential":
        return exponential_log_weight(s, tau, dim)
    if kernel == "student":
        return student_log_weight(s, nu_t * dim, dim)
    if kernel == "student_mle":
        return power_law_log_weight(s, nu_t * dim, 1.0)
    raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(KERNELS)}")


def exponential_log_weight(s: Tensor, tau: float | Tensor, dim: float) -> Tensor:
    """-s/(tau*d): with tau = 1 the dimension-normalised softmax kernel."""
    return -s / (tau * dim)


def student_log_weight(s: Tensor, nu: float | Tensor, dim: float) -> Tensor:
    """-((nu + d)/d) log(1 + s/nu); log1p, because 1 + s/nu has forgotten s when nu is large."""
    return -((nu + dim) / dim) * torch.log1p(s / nu)


def power_law_log_weight(s: Tensor, nu: float | Tensor, power: float | Tensor) -> Tensor:
    """-power * log(1 + s/nu): Appendix A's general form; (nu + d)/d is `student`, 1 is `student_mle`."""
    return -power * torch.log1p(s / nu)


def gaussian_penalty(s: Tensor) -> Tensor:
    """rho(s) = s: least squares."""
    return s


def exponential_penalty(s: Tensor, tau: float | Tensor, dim: float) -> Tensor:
    """rho(s) = tau*d (1 - exp(-s/(tau*d))): saturates at tau*d, so a far outlier costs a constant."""
    return -tau * dim * torch.expm1(-s / (tau * dim))


def student_penalty(s: Tensor, nu: float | Tensor, dim: float) -> Tensor:
    """rho(s) = d [1 - (1 + s/nu)^(-nu/d)]: saturates at d, more slowly than the exponential."""
    return -dim * torch.expm1(-(nu / dim) * torch.log1p(s / nu))


def student_mle_penalty(s: Tensor, nu: float | Tensor) -> Tensor:
    """rho(s) = nu log(1 + s/nu): minus the Student-t log-likelihood, up to a factor; grows without bound."""
    return nu * torch.log1p(s / nu)


def estimation_weights(
    log_precision: Tensor, log_weight: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A_ij = w kappa / sum_j w kappa (..., T, S) and the log evidence log sum_j w kappa (..., T).

    `allowed` is a boolean mask (T, S); every row must allow at least one observation.
    """
    logits = log_precision + log_weight
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))  # before the sum: evidence must not count the future
    return torch.softmax(logits, dim=-1), torch.logsumexp(logits, dim=-1)


def causal_mask(
    queries: int,
    keys: int | None = None,
    documents: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """True where observation j may inform query i: not later, and in the same document; (T, S), or (B, T, S).

    The queries are the last T of the S positions (all of them by default); `documents` (B, S) holds ids.
    """
    keys = queries if keys is None else keys
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if documents is None:
        return causal
    return causal & (documents[:, keys - queries :, None] == documents[:, None, :])
