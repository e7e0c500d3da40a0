"""RT covariance: Prop. 1 (G2, E36), Prop. 2 (G1), its inverse and determinant; Appendix A's Lyapunov propagation."""

import itertools

import pytest
import torch

from polarlm.geometry.covariance import (
    isotropic_variance,
    lyapunov_covariance,
    modal_process_variance,
    observation_covariance,
    propagate,
    propagated_variance,
    rt_covariance,
    rt_part,
    rt_precision,
)
from polarlm.geometry.transport import transport
from tests.geometry.geometry_draws import for_all_seeds, normal, positive, unit

D = 6


def covariance(seed: int, d: int) -> torch.Tensor:
    """A generic positive definite matrix."""
    a = normal(seed, d, d)
    return a @ a.T + torch.eye(d, dtype=a.dtype)


def stabiliser_of_e1(d: int) -> list[torch.Tensor]:
    """Signed permutations of the last d-1 axes with determinant +1: a finite group of rotations that fix e1.

    For d >= 3 averaging over it gives the same result as averaging over all of SO(d-1); for d = 2 it is trivial,
    as SO(1) is.
    """
    group = []
    for permutation in itertools.permutations(range(d - 1)):
        for signs in itertools.product((1.0, -1.0), repeat=d - 1):
            q = torch.eye(d, dtype=torch.float64)
            q[1:, 1:] = torch.eye(d - 1, dtype=torch.float64)[list(permutation)] * torch.tensor(signs).double()
            if torch.linalg.det(q) > 0:
                group.append(q)
    return group


@pytest.mark.parametrize("d", [3, 4])
def test_g2_averaging_over_the_stabiliser_leaves_the_rt_form(d):
    sigma, e1 = covariance(d, d), torch.eye(d, dtype=torch.float64)[0]
    group = stabiliser_of_e1(d)
    averaged = torch.stack([propagate(sigma, q) for q in group]).mean(0)
    torch.testing.assert_close(averaged, rt_covariance(e1, *rt_part(sigma, e1)))


def test_g2_fails_in_two_dimensions():
    """E36: with d = 2 the stabiliser is trivial, so Sigma(Re1) = R Sigma R^T is equivariant for any Sigma."""
    sigma, e1 = covariance(2, 2), torch.eye(2, dtype=torch.float64)[0]
    averaged = torch.stack([propagate(sigma, q) for q in stabiliser_of_e1(2)]).mean(0)
    torch.testing.assert_close(averaged, sigma)
    assert (averaged - rt_covariance(e1, *rt_part(sigma, e1))).abs().max() > 0.1


@for_all_seeds
def test_rt_covariance_is_rotation_equivariant_and_recovered_by_its_two_variances(seed):
    u, (radial, tangential) = unit(seed, D), positive(seed + 1, 2)
    rotation, _ = torch.linalg.qr(normal(seed + 2, D, D))
    sigma = rt_covariance(u, radial, tangential)
    torch.testing.assert_close(rt_covariance(rotation @ u, radial, tangential), propagate(sigma, rotation))
    torch.testing.assert_close(torch.stack(rt_part(sigma, u)), torch.stack((radial, tangential)))
    torch.testing.assert_close(u @ sigma @ u, radial)  # radial is the variance along u, not across


@for_all_seeds
def test_g1_propagation_keeps_the_rt_form_at_the_new_direction(seed):
    """Prop. 2 with T = gamma Phi: variances times gamma^2, projectors at u_i = Phi u_j."""
    w, u, (radial, tangential) = normal(seed, D // 2), unit(seed + 1, D), positive(seed + 2, 2)
    lag, mu = torch.tensor(1.3, dtype=torch.float64), 0.4
    transition = transport(torch.eye(D, dtype=u.dtype), lag, w, mu).T  # columns are the images of the axes
    u_i = transport(u, lag, w)
    sigma = propagate(rt_covariance(u, radial, tangential), transition)
    expected = rt_covariance(u_i, propagated_variance(radial, mu, lag), propagated_variance(tangential, mu, lag))
    torch.testing.assert_close(sigma, expected)
    wrong_place = rt_covariance(u, propagated_variance(radial, mu, lag), propagated_variance(tangential, mu, lag))
    assert (sigma - wrong_place).abs().max() > 1e-6
    assert propagated_variance(radial, mu, lag) < radial  # contraction shrinks uncertainty: the sign of mu


@for_all_seeds
def test_precision_is_the_inverse_and_the_determinant_ignores_the_state(seed):
    """The likelihood may drop log det Sigma: it is log s_r^2 + (D-1) log s_t^2 for every direction."""
    u, (radial, tangential) = unit(seed, D), positive(seed + 1, 2)
    sigma = rt_covariance(u, radial, tangential)
    torch.testing.assert_close(rt_precision(u, radial, tangential), torch.linalg.inv(sigma))
    torch.testing.assert_close(torch.logdet(sigma), radial.log() + (D - 1) * tangential.log())


def test_observed_covariance_goes_through_the_observation_matrix():
    m, u = normal(0, D, D), unit(1, D)
    sigma = rt_covariance(u, 0.5, 2.0)
    samples = torch.linalg.cholesky(sigma) @ normal(2, D, 200_000)
    seen = torch.cov(m @ samples)
    expected = observation_covariance(sigma, m)
    torch.testing.assert_close(seen, expected, atol=0.02 * float(expected.abs().max()), rtol=0)


@for_all_seeds
def test_lyapunov_covariance_solves_its_equation(seed):
    """App. A: V' = AV + VA^T + Q with V(0) = 0, and V is the integral of exp(As) Q exp(A^T s)."""
    a, q = normal(seed, 4, 4) - 2 * torch.eye(4, dtype=torch.float64), covariance(seed + 1, 4)
    lag, h = 0.7, 1e-5
    v = lyapunov_covariance(a, q, lag)
    rate = (lyapunov_covariance(a, q, lag + h) - lyapunov_covariance(a, q, lag - h)) / (2 * h)
    torch.testing.assert_close(rate, a @ v + v @ a.T + q, rtol=1e-5, atol=1e-6)
    assert lyapunov_covariance(a, q, 0.0).abs().max() == 0
    s = torch.linspace(0, lag, 501, dtype=a.dtype)
    integrand = propagate(q, torch.linalg.matrix_exp(a * s[:, None, None]))
    torch.testing.assert_close(torch.trapezoid(integrand, s, dim=0), v, rtol=1e-4, atol=1e-4)


@for_all_seeds
def test_isotropic_dynamics_reduce_the_integral_to_a_scalar(seed):
    """A = -mu I + i Omega, Q = sigma^2 I: V = sigma^2 (1 - E^2)/(2 mu) I, the modal formula with Re(lambda) = -mu."""
    w, mu, sigma2, lag = normal(seed, 2), 0.6, 1.7, 0.9
    dynamics = torch.zeros(4, 4, dtype=w.dtype)
    dynamics[:2, 2:], dynamics[2:, :2] = -torch.diag(w), torch.diag(w)
    dynamics -= mu * torch.eye(4, dtype=w.dtype)
    v = lyapunov_covariance(dynamics, sigma2 * torch.eye(4, dtype=w.dtype), lag)
    t = torch.tensor(lag, dtype=w.dtype)
    scalar = modal_process_variance(t, torch.tensor(-mu, dtype=w.dtype), torch.tensor(sigma2, dtype=w.dtype))
    torch.testing.assert_close(v, scalar * torch.eye(4, dtype=w.dtype))
    torch.testing.assert_close(scalar, sigma2 / (2 * mu) * (1 - torch.exp(-2 * mu * t)))


def test_isotropic_kernel_adds_its_terms_and_survives_zero_decay():
    lag = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    e2 = torch.exp(-2 * 0.3 * lag)
    expected = 0.8 / 0.6 * (1 - e2) + 0.5 * e2 + 0.1
    torch.testing.assert_close(isotropic_variance(lag, 0.3, 0.8, 0.5, 0.1), expected)
    torch.testing.assert_close(isotropic_variance(lag, 0.3, 0.8, 0.5, 0.1, query_variance=0.2), expected + 0.2)
    torch.testing.assert_close(isotropic_variance(lag, 0.0, 0.8, 0.5, 0.1), 0.8 * lag + 0.6)  # a random walk
