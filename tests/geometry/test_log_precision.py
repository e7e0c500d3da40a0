"""Log precisions: K3-K8, finite at every extreme, and what decay does to them (E18)."""

import math

import pytest
import torch

from polarlm.geometry.covariance import isotropic_variance
from polarlm.geometry.precision import log_kappa, log_kappa_tilde, log_rho, log_rho_tilde, prior_depth
from polarlm.geometry.robust import causal_mask, log_influence
from tests.geometry.geometry_draws import for_all_seeds, positive

LAG = torch.arange(6, dtype=torch.float64)


def lags(n: int) -> torch.Tensor:
    """(n, n) lags i - j, zero above the diagonal."""
    t = torch.arange(n, dtype=torch.float64)
    return (t[:, None] - t).clamp_min(0)


@for_all_seeds
def test_k7_log_domain_equals_the_printed_formulas(seed):
    m = positive(seed, 6)
    mu, eta_k2, eta_q2, sigma02, m_inf2 = positive(seed + 1, 5).tolist()
    e2 = torch.exp(-2 * mu * LAG)
    numerator = m**2 * e2 + m_inf2
    directional = {"mu": mu, "eta_k2": eta_k2, "sigma02": sigma02, "m_inf2": m_inf2}
    torch.testing.assert_close(log_kappa(m, LAG, **directional).exp(), numerator / (eta_k2 * e2 + sigma02))
    torch.testing.assert_close(
        log_kappa_tilde(m, LAG, eta_q2=eta_q2, **directional).exp(), numerator / (eta_k2 * e2 + eta_q2 + sigma02)
    )
    radial = {"mu": mu, "eta_k2": eta_k2, "sigma02": sigma02}
    torch.testing.assert_close(log_rho(LAG, **radial).exp(), 1 / (eta_k2 * e2 + sigma02))
    torch.testing.assert_close(log_rho_tilde(LAG, eta_q2=eta_q2, **radial).exp(), 1 / (eta_k2 * e2 + eta_q2 + sigma02))
    assert (log_kappa_tilde(m, LAG, eta_q2=eta_q2, **directional) < log_kappa(m, LAG, **directional)).all()


@for_all_seeds
def test_process_noise_term_is_appendix_a(seed):
    mu, eta2, sigma02, sigma2 = positive(seed, 4).tolist()
    expected = -isotropic_variance(LAG, mu, sigma2, eta2, sigma02).log()
    actual = log_kappa(None, LAG, mu=mu, eta_k2=eta2, sigma02=sigma02, process2=sigma2 / (2 * mu))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m_inf2", [0.01, 0.0])
def test_k7_finite_with_finite_gradients_at_every_extreme(dtype, m_inf2):
    lag = torch.tensor([0.0, 1.0, 1e3, 1e5], dtype=dtype)
    m = torch.tensor([0.0, 1e-6, 1.0, 1e3], dtype=dtype)[:, None].requires_grad_()
    mu = torch.tensor(0.1, dtype=dtype, requires_grad=True)
    noise = {"mu": mu, "eta_k2": 0.04, "sigma02": 0.02}
    kappa = log_kappa(m, lag, m_inf2=m_inf2, **noise)
    tilde = log_kappa_tilde(m, lag, eta_q2=0.04, m_inf2=m_inf2, process2=0.5, **noise)
    rho = log_rho(lag, **noise) + log_rho_tilde(lag, eta_q2=0.1, **noise)
    total = kappa.sum() + tilde.sum() + rho.sum()
    assert total.isfinite()
    total.backward()
    assert m.grad.isfinite().all() and mu.grad.isfinite()
    for nu in (1e-3, 1e8):
        s = tilde.detach().clamp_max(math.log(1e4)).exp() * 4.0
        assert log_influence(s, "student", dim=8, nu_t=nu).isfinite().all()


def test_naive_formula_does_fail_where_ours_does_not():
    """The reason for logaddexp: fp32 at lag 1e5 without floors."""
    lag, m = torch.tensor(1e5), torch.tensor(1.0)
    e2 = torch.exp(-2 * 0.1 * lag)
    assert not (m**2 * e2 / (0.04 * e2)).log().isfinite()
    torch.testing.assert_close(
        log_kappa(m, lag, mu=0.1, eta_k2=0.04, sigma02=0.0).item(), math.log(1 / 0.04), rtol=1e-3, atol=0
    )


@for_all_seeds
def test_k3_constant_magnitude_without_decay_drops_out_of_the_softmax(seed):
    mask, noise = causal_mask(6), {"mu": 0.0, "eta_k2": 0.3, "sigma02": 0.2, "m_inf2": 0.1}
    constant = log_kappa(torch.full((1, 6), 1.7, dtype=torch.float64), lags(6), **noise)
    weights = torch.softmax(constant.masked_fill(~mask, -math.inf), -1)
    torch.testing.assert_close(weights, mask / mask.sum(-1, keepdim=True, dtype=torch.float64))
    varied = log_kappa(positive(seed, 1, 6), lags(6), **noise)
    assert not torch.allclose(torch.softmax(varied.masked_fill(~mask, -math.inf), -1), weights)


@for_all_seeds
def test_k4_without_key_noise_and_floor_kappa_is_alibi(seed):
    m, (mu, sigma02) = positive(seed, 6), positive(seed + 1, 2).tolist()
    kappa = log_kappa(m, LAG, mu=mu, eta_k2=0.0, sigma02=sigma02)
    torch.testing.assert_close(kappa, (m**2 / sigma02).log() - 2 * mu * LAG)
    assert kappa[5] - 2 * m[5].log() < kappa[0] - 2 * m[0].log()  # slope is negative: recency


@for_all_seeds
def test_k5_without_floors_decay_gives_no_positional_prior(seed):
    m, (mu, eta_k2) = positive(seed), positive(seed + 1, 2).tolist()
    far = torch.tensor([0.0, 1.0, 1e3, 1e5], dtype=torch.float64)
    kappa = log_kappa(m, far, mu=mu, eta_k2=eta_k2, sigma02=0.0)
    torch.testing.assert_close(kappa, (m**2 / eta_k2).log().expand(4))


@for_all_seeds
def test_k6_common_rescaling_of_magnitude_and_noise_changes_nothing(seed):
    m, c = positive(seed, 6), positive(seed + 1)
    mu, eta_k, eta_q, sigma0, m_inf = positive(seed + 2, 5)

    def kappas(scale):
        noise = {"mu": mu, "eta_k2": (scale * eta_k) ** 2, "sigma02": (scale * sigma0) ** 2}
        noise["m_inf2"] = (scale * m_inf) ** 2
        return torch.stack(
            (
                log_kappa(scale * m, LAG, **noise),
                log_kappa_tilde(scale * m, LAG, eta_q2=(scale * eta_q) ** 2, **noise),
            )
        )

    torch.testing.assert_close(kappas(c), kappas(torch.tensor(1.0, dtype=torch.float64)))

    def radial_distance(scale):
        tilde = log_rho_tilde(LAG, mu=mu, eta_k2=(scale * eta_k) ** 2, eta_q2=0.0, sigma02=(scale * sigma0) ** 2)
        return tilde.exp() * (scale * (m - 0.8)) ** 2

    torch.testing.assert_close(radial_distance(c), radial_distance(1.0))


@for_all_seeds
def test_k8_limits_at_long_lag(seed):
    mu, eta_k2, eta_q2, sigma02, m_inf2 = positive(seed, 5).tolist()
    far, m = torch.tensor(1e5, dtype=torch.float64), positive(seed + 1)
    noise = {"mu": mu, "eta_k2": eta_k2, "sigma02": sigma02, "m_inf2": m_inf2}
    torch.testing.assert_close(log_kappa(m, far, **noise).item(), math.log(m_inf2 / sigma02))
    torch.testing.assert_close(
        log_kappa_tilde(m, far, eta_q2=eta_q2, **noise).item(), math.log(m_inf2 / (eta_q2 + sigma02))
    )


@for_all_seeds
def test_e18_recency_needs_more_signal_near_than_far(seed):
    """Depth > 0 exactly when m^2/eta_k^2 > m_inf^2/sigma_0^2; otherwise decay prefers the distant past."""
    eta_k2, sigma02, m_inf2 = positive(seed, 3)
    m, noise = positive(seed + 1), {"eta_k2": eta_k2, "sigma02": sigma02, "m_inf2": m_inf2}
    depth = prior_depth(m, **noise)
    ends = log_kappa(m, torch.tensor([0.0, 1e6], dtype=torch.float64), mu=1.0, **noise)
    torch.testing.assert_close(depth, ends[0] - ends[1])
    assert (depth > 0) == (m**2 / eta_k2 > m_inf2 / sigma02)
