"""The radial-tangential likelihood: exact, decomposed, decoupled to first order (Section 3.3, Appendix C.1).

State x = m*u with unit u (D,), transported observations x_hat (S, D), variances (S,) or scalars. Each function returns
the paper's L: the sum over observations of squared Mahalanobis distances, with no factor 1/2. The log-determinant that
a full likelihood also has, log sigma_r^2 + (D-1) log sigma_t^2, does not depend on the state and is left out as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.geometry.covariance import rt_precision
from polarlm.geometry.sphere import Field, from_polar, radial_part, radial_projector, tangential_part
from polarlm.geometry.transport import to_complex, to_real

Variance = float | Tensor


def rt_likelihood(
    m: Tensor,
    u: Tensor,
    observations: Tensor,
    radial_variance: Variance,
    tangential_variance: Variance,
    field: Field = "real",
) -> Tensor:
    """L(m, u) = sum_j (m u - x_j)^T P_j (m u - x_j), by the precision matrices (Eq. rt_nll)."""
    residual = from_polar(m, u) - observations
    radial = _per_observation(radial_variance, observations)[:, None, None]
    tangential = _per_observation(tangential_variance, observations)[:, None, None]
    precision = rt_precision(u, radial, tangential, field)  # (S, D, D)
    return torch.einsum("ja,jab,jb->", residual, precision, residual)


def radial_likelihood(
    m: Tensor, u: Tensor, observations: Tensor, radial_variance: Variance, field: Field = "real"
) -> Tensor:
    """L_R(m, u) = sum_j |u^dagger x_j - m|^2 / sigma_r,j^2 (Prop. 3)."""
    residual = radial_part(u, observations, field) - from_polar(m, u)
    return ((residual * residual).sum(-1) / radial_variance).sum()


def tangential_likelihood(
    u: Tensor, observations: Tensor, tangential_variance: Variance, field: Field = "real"
) -> Tensor:
    """L_T(u) = sum_j m_j^2/sigma_t,j^2 (1 - |u^dagger u_j|^2) (Prop. 3)."""
    magnitude2 = (observations * observations).sum(-1)
    alignment2 = (correlation(u, observations, field).abs() ** 2) / magnitude2
    return (magnitude2 / tangential_variance * (1.0 - alignment2)).sum()


def decoupled_radial_likelihood(m: Tensor, observations: Tensor, radial_variance: Variance) -> Tensor:
    """L_R(m) = sum_j (m - m_j)^2 / sigma_r,j^2: the radial term once its dependence on u is dropped (Prop. 4)."""
    magnitude = torch.linalg.vector_norm(observations, dim=-1)
    return ((m - magnitude) ** 2 / radial_variance).sum()


def directional_least_squares(u: Tensor, directions: Tensor, kappa: Tensor) -> Tensor:
    """sum_j kappa_j ||u - u_j||^2: the first-order directional objective (Eq. quadratic_likelihood_LT)."""
    return (kappa * ((u - directions) ** 2).sum(-1)).sum()


def directional_least_squares_by_head(u: Tensor, directions: Tensor, kappa: Tensor) -> Tensor:
    """The same objective per head, (H,): u (H, Dh), directions (S, H, Dh), kappa (S, H) (Lemma, App. D.2)."""
    return (kappa * ((u - directions) ** 2).sum(-1)).sum(0)


def tangent_step(u: Tensor, u_bar: Tensor) -> Tensor:
    """Delta u = P_T(u)(u_bar - u) = P_T(u) u_bar: the least-squares step that stays tangent (Section 3.4)."""
    return tangential_part(u, u_bar - u)


def radial_consensus(weights: Tensor, cosine: Tensor, magnitude: Tensor) -> Tensor:
    """m_bar = sum_j A_j c_j m_j: the magnitude that minimises the radial term with the direction held fixed."""
    return (weights * cosine * magnitude).sum(-1)


def correlation(u: Tensor, x: Tensor, field: Field = "real") -> Tensor:
    """u^dagger x: a real number for field="real", complex otherwise (Appendix F.1)."""
    if field == "complex":
        return (to_complex(u).conj() * to_complex(x)).sum(-1)
    return (u * x).sum(-1)


def squared_chord(u: Tensor, directions: Tensor) -> Tensor:
    """||u_i - u_j||^2 = ||u_i||^2 + ||u_j||^2 - 2<u_i, u_j>: u (..., T, D), directions (..., S, D) to (..., T, S)."""
    norms = (u * u).sum(-1).unsqueeze(-1) + (directions * directions).sum(-1).unsqueeze(-2)
    return (norms - 2.0 * u @ directions.transpose(-1, -2)).clamp_min(0.0)  # rounding must not make a distance negative


def _per_observation(variance: Variance, observations: Tensor) -> Tensor:
    return torch.as_tensor(variance, dtype=observations.dtype).expand(observations.shape[0])


# The directional objective without the local-consensus assumption (Appendix G.1).
#
# With the magnitude held at m, everything in L_R + L_T that depends on the direction is
#     L_D(u) = -2 <u, h> - <u, J u>,   h = m sum_j rho_j m_j u_j,   J = sum_j (tau_j - rho_j) m_j^2 u_j u_j^dagger
# with rho = 1/sigma_r^2 and tau = 1/sigma_t^2. Observations: unit directions (S, D), magnitudes (S,), precisions (S,).
# The sphere is |u| = 1 in R^D, so its tangent projector is the real one also where field="complex" makes u_j u_j^dagger
# complex. kappa = tau m^2 carries no floors here: the gate is derived without them (docs/theory.md E34).


def directional_terms(
    m: Tensor, directions: Tensor, magnitudes: Tensor, rho: Tensor, tau: Tensor, field: Field = "real"
) -> tuple[Tensor, Tensor]:
    """h (D,), the radial channel's pull, and J (D, D), what the two channels disagree about."""
    h = m * ((rho * magnitudes).unsqueeze(-1) * directions).sum(-2)
    weight = (tau - rho) * magnitudes.square()
    return h, (weight[:, None, None] * radial_projector(directions, field)).sum(0)


def directional_objective(u: Tensor, h: Tensor, J: Tensor) -> Tensor:
    """L_D(u) on the unit sphere, up to the constant that the direction does not enter."""
    return -2.0 * (u * h).sum(-1) - (u * (J @ u)).sum(-1)


def directional_gradient(u: Tensor, h: Tensor, J: Tensor) -> Tensor:
    """The Riemannian gradient -2 P_T(u)(h + J u)."""
    return -2.0 * tangential_part(u, h + J @ u)


def directional_hessian(u: Tensor, h: Tensor, J: Tensor, step: Tensor) -> Tensor:
    """The Riemannian Hessian applied to a step: 2 s P_T step - 2 P_T J P_T step, s = <u, h> + <u, J u>.

    The first term is the sphere's own curvature: L_D is concave in the space around it where tau > rho.
    """
    tangent = tangential_part(u, step)
    curvature = (u * h).sum(-1) + (u * (J @ u)).sum(-1)
    return 2.0 * curvature * tangent - 2.0 * tangential_part(u, J @ tangent)


def gated_precision(
    m: Tensor,
    u: Tensor,
    directions: Tensor,
    magnitudes: Tensor,
    rho: Tensor,
    tau: Tensor,
    field: Field = "real",
) -> Tensor:
    """kappa_j g_j = rho_j m m_j + (tau_j - rho_j) m_j^2 u_j^dagger u (S,), complex for field="complex".

    Written without the gate g = (rho/tau) m/m_j + (1 - rho/tau) u_j^dagger u itself, which grows with the lag.
    """
    return rho * m * magnitudes + (tau - rho) * magnitudes.square() * correlation(directions, u, field)


def gated_sum(gated: Tensor, directions: Tensor) -> Tensor:
    """sum_j kappa_j g_j u_j (D,), which is h + J u."""
    if gated.is_complex():
        return to_real((gated.unsqueeze(-1) * to_complex(directions)).sum(-2))
    return (gated.unsqueeze(-1) * directions).sum(-2)


def gated_step(u: Tensor, gated: Tensor, directions: Tensor, kappa: Tensor) -> Tensor:
    """P_T(u) sum_j kappa_j g_j u_j / sum_j kappa_j: the damped Newton step, a descent direction everywhere."""
    return tangential_part(u, gated_sum(gated, directions)) / kappa.sum()
