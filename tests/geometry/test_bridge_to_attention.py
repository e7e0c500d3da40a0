"""The attention kernel computes this package's mathematics: its reference, rebuilt from geometry functions alone."""

import math

import pytest
import torch

from polarlm.attention.robust import DirectionalNoise, RadialNoise, RobustCall, robust_attention
from polarlm.geometry.likelihood import radial_consensus, squared_chord
from polarlm.geometry.precision import log_kappa, log_kappa_tilde, log_rho, log_rho_tilde
from polarlm.geometry.robust import causal_mask, estimation_weights, log_influence
from polarlm.geometry.sphere import to_polar
from tests.geometry.geometry_draws import normal, positive

B, H, T, DH = 2, 3, 7, 4


def test_k6_units_of_magnitude_and_noise_are_free():
    """(m, m_inf, eta, sigma_0) times c: both attentions stay, the radial estimate is in the new unit."""
    q, k = normal(0, B, H, T, DH), normal(1, B, H, T, DH)
    m, v = to_polar(normal(2, B, T, H * DH))
    mu, eta_k2, eta_q2, sigma02, m_inf2, nu, tau = 0.2 * positive(3, 7, H)
    values = v.view(B, T, H, DH).transpose(1, 2)

    def run(c: float):
        noise = DirectionalNoise(mu, c**2 * eta_k2, c**2 * eta_q2, c**2 * sigma02, c**2 * m_inf2, nu, tau)
        rates = (torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.2 * c**2, 0.3 * c**2, 0.1 * c**2, 2.0))
        options = dict(kernel="student", radial=RadialNoise(*rates), radial_mode="own", return_weights=True)
        return robust_attention(RobustCall(q, k, values, noise, magnitude=c * m, **options), "reference")

    one, other = run(1.0), run(1.7)
    for name in ("directional", "radial"):
        torch.testing.assert_close(getattr(other.weights, name), getattr(one.weights, name))
    for name in ("log_evidence", "v_bar"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name))
    torch.testing.assert_close(other.m_bar, 1.7 * one.m_bar)


@pytest.mark.parametrize("kernel", ["student", "exponential", "gaussian"])
def test_kernel_and_geometry_agree(kernel):
    q, k = normal(0, B, H, T, DH), normal(1, B, H, T, DH)
    m, v = to_polar(normal(2, B, T, H * DH))
    mu, eta_k2, eta_q2, sigma02, m_inf2, nu, tau = 0.2 * positive(3, 7, H)
    noise = DirectionalNoise(mu, eta_k2, eta_q2, sigma02, m_inf2, nu, tau, None)
    one = torch.tensor(1.0, dtype=torch.float64)
    radial = RadialNoise(mu=0.1 * one, eta_k2=0.2 * one, eta_q2=0.3 * one, sigma02=0.1 * one, nu=2.0 * one)
    heads = v.view(B, T, H, DH).transpose(1, 2)
    options = dict(radial=radial, radial_mode="own", return_weights=True)
    out = robust_attention(RobustCall(q, k, heads, noise, kernel, m, **options), "reference")

    t = torch.arange(T, dtype=torch.float64)
    lag, mask = (t[:, None] - t).clamp_min(0), causal_mask(T)
    per_head = {name: value[:, None, None] for name, value in vars(noise).items() if value is not None}
    shared = {name: per_head[name] for name in ("mu", "eta_k2", "sigma02", "m_inf2")}
    m_j = m[:, None, None, :]
    kappa = log_kappa(m_j, lag, **shared)
    tilde = log_kappa_tilde(m_j, lag, eta_q2=per_head["eta_q2"], **shared)
    torch.testing.assert_close(out.weights.log_kappa, kappa)
    torch.testing.assert_close(out.weights.log_kappa_tilde, tilde)
    assert tilde.max() < math.log(1e4)  # the kernel caps there, the mathematics does not
    s = tilde.exp() * squared_chord(q, k)
    log_w = log_influence(s, kernel, dim=DH / 2, nu_t=per_head["nu"], tau=per_head["tau"])
    weights, evidence = estimation_weights(kappa, log_w, mask)
    torch.testing.assert_close(out.weights.directional, weights)
    torch.testing.assert_close(out.log_evidence, evidence)
    torch.testing.assert_close(out.v_bar, weights @ heads)

    cosine = v @ v.transpose(1, 2) / (H * DH)
    carried = torch.exp(-0.1 * lag) * m[:, None, :]
    rho = log_rho(lag, mu=0.1, eta_k2=0.2, sigma02=0.1)
    rho_tilde = log_rho_tilde(lag, mu=0.1, eta_k2=0.2, eta_q2=0.3, sigma02=0.1)
    d2 = rho_tilde.exp() * (cosine * carried - m[:, :, None]) ** 2
    radial_weights, _ = estimation_weights(rho, log_influence(d2, "student", dim=1, nu_t=2.0), mask)
    torch.testing.assert_close(out.weights.radial, radial_weights)
    torch.testing.assert_close(out.m_bar, radial_consensus(radial_weights, cosine, carried))
