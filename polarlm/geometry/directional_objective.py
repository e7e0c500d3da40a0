"""The directional objective without the local-consensus assumption (Appendix G.1).

With the magnitude held at m, everything in L_R + L_T that depends on the direction is
    L_D(u) = -2 <u, h> - <u, J u>,   h = m sum_j rho_j m_j u_j,   J = sum_j (tau_j - rho_j) m_j^2 u_j u_j^dagger
with rho = 1/sigma_r^2 and tau = 1/sigma_t^2. Observations: unit directions (S, D), magnitudes (S,), precisions (S,).
The sphere is |u| = 1 in R^D, so its tangent projector is the real one also where field="complex" makes u_j u_j^dagger
complex. kappa = tau m^2 carries no floors here: the gate is derived without them (docs/theory.md E34).
"""

from __future__ import annotations

from torch import Tensor

from polarlm.geometry.likelihood import correlation
from polarlm.geometry.sphere import Field, radial_projector, tangential_part
from polarlm.geometry.transport import to_complex, to_real


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
