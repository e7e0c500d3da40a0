"""Robust influence: K1, K9, K10, K13, R3, and what the paper's Student-t weight is and is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.geometry.likelihood import squared_chord
from polarlm.geometry.precision import log_rho
from polarlm.geometry.robust import (
    KERNELS,
    causal_mask,
    estimation_weights,
    exponential_log_weight,
    exponential_penalty,
    gaussian_penalty,
    log_influence,
    power_law_log_weight,
    student_log_weight,
    student_mle_penalty,
    student_penalty,
)
from tests.geometry.geometry_draws import for_all_seeds, normal, positive, unit

S = torch.tensor([0.0, 0.3, 1.0, 4.0, 30.0], dtype=torch.float64)


def test_k1_student_becomes_exponential_at_rate_one_over_nu():
    x, dim = S[:4], 5.0
    exponential = log_influence(x * dim, "exponential", dim=dim, tau=1.0)
    errors = [
        float((log_influence(x * dim, "student", dim=dim, nu_t=nu) - exponential).abs().max()) for nu in (1e3, 1e4, 1e5)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05) and errors[1] / errors[2] == pytest.approx(10, rel=0.05)
    assert float((log_influence(x * dim, "student", dim=dim, nu_t=1e6) - exponential).abs().max()) < 1e-5


@settings(max_examples=20, deadline=None, derandomize=True)
@given(s=st.floats(0, 1e3), dim=st.floats(0.5, 64), nu=st.floats(0.5, 1e4), tau=st.floats(0.1, 10))
def test_k10_weight_is_the_derivative_of_its_penalty(s, dim, nu, tau):
    x = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    pairs = {
        "exponential": (exponential_penalty(x, tau, dim), exponential_log_weight(x, tau, dim)),
        "student": (student_penalty(x, nu, dim), student_log_weight(x, nu, dim)),
        "student_mle": (student_mle_penalty(x, nu), power_law_log_weight(x, nu, 1.0)),
        "gaussian": (gaussian_penalty(x), log_influence(x, "gaussian", dim=dim)),
    }
    for rho, log_w in pairs.values():
        (slope,) = torch.autograd.grad(rho, x)
        torch.testing.assert_close(slope, log_w.detach().exp(), rtol=1e-9, atol=1e-14)


def test_robust_penalties_saturate_and_weights_fall_with_distance():
    far = torch.tensor(1e9, dtype=torch.float64)
    assert exponential_penalty(far, 2.0, 3.0) == pytest.approx(6.0)
    assert student_penalty(far, 8.0, 3.0) == pytest.approx(3.0, rel=1e-6)
    for kernel in set(KERNELS) - {"gaussian"}:
        log_w = log_influence(S, kernel, dim=4)
        assert log_w[0] == 0 and (log_w.diff() < 0).all()
    heavy, light = log_influence(S, "student", dim=4), log_influence(S, "exponential", dim=4)
    assert heavy[-1] > light[-1]  # the heavier tail


def test_polar_form_is_the_power_law_with_nu_t_times_d():
    """nu = nu_t d turns (nu + d)/d into nu_t + 1 and s/nu into s/(nu_t d) (App. C, last display)."""
    d, nu_t = 6.0, 4.0
    printed = -(nu_t + 1) * torch.log(1 + S / (nu_t * d))
    torch.testing.assert_close(log_influence(S, "student", dim=d, nu_t=nu_t), printed)
    torch.testing.assert_close(power_law_log_weight(S, nu_t * d, nu_t + 1), printed)


def test_papers_student_weight_is_not_what_a_student_likelihood_gives():
    """-log t_nu(s) = (nu + D)/2 log(1 + s/nu) has slope proportional to (1 + s/nu)^-1, whatever the dimension.

    The paper's exponent (nu + d)/d makes the weight a power of the density instead. Algorithm 1's printed radial logit,
    without (nu_r + 1), is the likelihood's weight.
    """
    s = S.clone().requires_grad_()
    nu, real_dim = 8.0, 4
    negative_log = -torch.lgamma(torch.tensor((nu + real_dim) / 2)) + (nu + real_dim) / 2 * torch.log1p(s / nu)
    (slope,) = torch.autograd.grad(negative_log.sum(), s)
    relative = slope / slope[0]
    torch.testing.assert_close(relative, power_law_log_weight(S, nu, 1.0).exp())
    torch.testing.assert_close(relative, log_influence(S, "student_mle", dim=2.0, nu_t=nu / 2.0).exp())
    assert (relative - student_log_weight(S, nu, real_dim / 2).exp()).abs().max() > 0.2


def test_large_nu_keeps_its_digits():
    s, nu = torch.tensor(3.0), 1e8
    assert student_log_weight(s, nu, 1.0).item() == pytest.approx(-3.0, rel=1e-5)
    naive = -(nu + 1) * torch.log(1 + s / nu)  # fp32: 1 + 3e-8 is 1
    assert naive.item() == 0.0


@for_all_seeds
def test_k9_softmax_of_logits_is_weighted_precision_and_its_normaliser_the_evidence(seed):
    log_kappa, log_w = normal(seed, 5, 5), -positive(seed + 1, 5, 5)
    mask = causal_mask(5)
    product = (log_kappa.exp() * log_w.exp()) * mask
    a, evidence = estimation_weights(log_kappa, log_w, mask)
    torch.testing.assert_close(a, product / product.sum(-1, keepdim=True))
    torch.testing.assert_close(evidence, product.sum(-1).log())
    assert a.triu(1).abs().max() == 0


def test_evidence_does_not_count_the_future():
    logits = torch.zeros(4, 4, dtype=torch.float64)
    _, evidence = estimation_weights(logits, logits, causal_mask(4))
    torch.testing.assert_close(evidence, torch.arange(1, 5, dtype=torch.float64).log())


@for_all_seeds
def test_k13_query_norm_cannot_be_dropped(seed):
    """E12: ||q||^2 leaves the softmax only for the exponential kernel with one kappa_tilde for all keys."""
    q, k = 2.0 * unit(seed, 1, 6), positive(seed + 2, 5, 1) * unit(seed + 1, 5, 6)
    full = squared_chord(q, k)
    torch.testing.assert_close(full, (q - k).square().sum(-1).unsqueeze(0))
    dropped = full - q.square().sum()
    constant, varied = torch.full((1, 5), 0.7, dtype=q.dtype), positive(seed + 3, 1, 5)

    def difference(kappa, kernel):
        a = torch.softmax(log_influence(kappa * full, kernel, dim=3), -1)
        # Student-t of a negative "distance" needs its argument to stay above -nu; it does for these draws.
        b = torch.softmax(log_influence((kappa * dropped).clamp_min(-11.0), kernel, dim=3), -1)
        return (a - b).abs().max()

    assert difference(constant, "exponential") < 1e-12
    assert difference(varied, "exponential") > 1e-4
    assert difference(constant, "student") > 1e-4


@for_all_seeds
def test_r3_gaussian_limit_of_the_radial_weights(seed):
    """E1: with exponent nu_r + 1 the limit is exp(-d_r^2); with Algorithm 1's exponent 1 it is rho alone."""
    lag, d_r2 = torch.arange(5, dtype=torch.float64), positive(seed, 5)
    log_precision = log_rho(lag, mu=0.2, eta_k2=0.3, sigma02=0.2)
    rho = 1 / (0.3 * torch.exp(-0.4 * lag) + 0.2)
    full, _ = estimation_weights(log_precision, student_log_weight(d_r2, 1e9, 1.0))
    gaussian = rho * torch.exp(-d_r2)
    torch.testing.assert_close(full, gaussian / gaussian.sum(), atol=1e-7, rtol=0)
    printed, _ = estimation_weights(log_precision, power_law_log_weight(d_r2, 1e9, 1.0))
    torch.testing.assert_close(printed, rho / rho.sum(), atol=1e-7, rtol=0)
    assert (full - printed).abs().max() > 1e-3


def test_student_is_finite_at_extreme_nu():
    for nu in (1e-3, 1e8):
        for dtype in (torch.float32, torch.float64):
            s = torch.tensor([0.0, 1e-8, 1.0, 1e8], dtype=dtype, requires_grad=True)
            log_w = log_influence(s, "student", dim=16, nu_t=nu)
            log_w.sum().backward()
            assert log_w.isfinite().all() and s.grad.isfinite().all()


def test_unknown_kernel_names_the_choices():
    with pytest.raises(ValueError, match=r"gaussian, exponential, student"):
        log_influence(S, "huber", dim=1)
    assert math.isclose(log_influence(S, "gaussian", dim=1).abs().sum(), 0)
