"""Projections over heads: Prop. 5 (H1, H4, H5), its special cases (H2, H3), the first token (G12), extremes."""

import math

import pytest
import torch
from torch.nn import functional as F

from polarlm.geometry.multihead import correction_shares, project
from polarlm.geometry.sphere import to_polar
from tests.geometry.geometry_draws import for_all_seeds, normal, unit

H, W = 4, 6


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A direction at radius sqrt(D) split in heads, its consensus, and each head's log evidence."""
    _, v = to_polar(normal(seed, 3, H * W))
    return v.view(3, H, W), normal(seed + 1, 3, H, W), 2.0 * normal(seed + 2, 3, H)


def kkt(v: torch.Tensor, delta: torch.Tensor, evidence: torch.Tensor) -> torch.Tensor:
    """min sum_h P_h ||D_h - delta_h||^2 with <v, D> = 0, as one linear system in (D, lambda)."""
    n = H * W
    p = evidence.repeat_interleave(W)
    system = torch.zeros(n + 1, n + 1, dtype=v.dtype)
    system[:n, :n] = torch.diag(p)
    system[:n, n] = system[n, :n] = v.reshape(-1)
    right = torch.cat((p * delta.reshape(-1), torch.zeros(1, dtype=v.dtype)))
    return torch.linalg.solve(system, right)[:n].view(H, W)


@for_all_seeds
def test_h1_proposition_5_solves_the_constrained_problem(seed):
    v, v_bar, log_evidence = draw(seed)
    update = project(v, v_bar, log_evidence, "evidence")
    for row in range(3):
        brute = kkt(v[row], v_bar[row] - v[row], log_evidence[row].exp())
        torch.testing.assert_close(update[row], brute, rtol=1e-7, atol=1e-9)
    assert (v * update).sum((-1, -2)).abs().max() < 1e-10  # tangency, summed over heads
    assert (v * update).sum(-1).abs().max() > 1e-3  # but not head by head


@for_all_seeds
def test_h2_equal_evidence_is_the_global_projection(seed):
    v, v_bar, log_evidence = draw(seed)
    expected = project(v, v_bar, mode="global")
    torch.testing.assert_close(project(v, v_bar, torch.full((3, H), 1.7, dtype=v.dtype), "evidence"), expected)
    torch.testing.assert_close(project(v, v_bar, 0.0 * log_evidence, "evidence"), expected)  # evidence^0
    assert (project(v, v_bar, log_evidence, "evidence") - expected).abs().max() > 1e-3


@for_all_seeds
def test_global_projection_is_the_projector_of_the_whole_vector(seed):
    v, v_bar, _ = draw(seed)
    flat, flat_bar = v.flatten(-2), v_bar.flatten(-2)
    expected = flat_bar - flat * (flat * flat_bar).sum(-1, keepdim=True) / (H * W)
    torch.testing.assert_close(project(v, v_bar, mode="global").flatten(-2), expected)


@for_all_seeds
def test_h3_one_head_makes_all_projections_xsa(seed):
    v, v_bar, log_evidence = (x[:, :1] for x in draw(seed))
    unit_v = F.normalize(v, dim=-1)
    xsa = v_bar - (v_bar * unit_v).sum(-1, keepdim=True) * unit_v
    for mode in ("per_head", "global", "evidence"):
        torch.testing.assert_close(project(v, v_bar, log_evidence, mode), xsa)


@for_all_seeds
def test_per_head_projection_is_xsa_and_not_global(seed):
    """E14: with several heads XSA is per head, and differs from Eq. rt_transformer_update."""
    v, v_bar, _ = draw(seed)
    unit_v = F.normalize(v, dim=-1)
    per_head = project(v, v_bar, mode="per_head")
    torch.testing.assert_close(per_head, v_bar - (v_bar * unit_v).sum(-1, keepdim=True) * unit_v)
    assert (per_head - project(v, v_bar, mode="global")).abs().max() > 1e-3
    torch.testing.assert_close(project(v, v_bar, mode="none"), v_bar)


@for_all_seeds
def test_h4_only_differences_of_log_evidence_matter(seed):
    v, v_bar, log_evidence = draw(seed)
    expected = project(v, v_bar, log_evidence, "evidence")
    for shift in (5000.0, -5000.0):
        torch.testing.assert_close(project(v, v_bar, log_evidence + shift, "evidence"), expected)


@for_all_seeds
def test_h5_delta_may_not_be_replaced_by_the_consensus(seed):
    """E15: P_T forgives v_bar for v_bar - v, Prop. 5 does not once evidence differs."""
    v, v_bar, log_evidence = draw(seed)
    shares = correction_shares(v.square().sum(-1), log_evidence).unsqueeze(-1) / v.square().sum(-1, keepdim=True)
    wrong = v_bar - v * (v * v_bar).sum((-1, -2), keepdim=True) * shares
    assert (wrong - project(v, v_bar, log_evidence, "evidence")).abs().max() > 1e-3
    equal = torch.zeros_like(log_evidence)
    shares = correction_shares(v.square().sum(-1), equal).unsqueeze(-1) / v.square().sum(-1, keepdim=True)
    torch.testing.assert_close(
        v_bar - v * (v * v_bar).sum((-1, -2), keepdim=True) * shares, project(v, v_bar, equal, "evidence")
    )


def test_the_head_with_least_evidence_pays_most():
    v = torch.ones(H, W, dtype=torch.float64)
    log_evidence = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    shares = correction_shares(v.square().sum(-1), log_evidence)
    assert (shares.diff() < 0).all()
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(shares[0] / shares[1], torch.tensor(1.0, dtype=torch.float64).exp())


def test_clamped_evidence_bounds_the_step_of_a_small_head():
    """E16: a head with little of the vector and e^-50 of the evidence would pay for all of it."""
    v, v_bar, _ = draw(2)
    v[:, 1] *= 1e-4
    log_evidence = torch.tensor([0.0, -50.0, 0.0, 0.0], dtype=torch.float64)
    wild, tame = (project(v, v_bar, log_evidence, "evidence", clamp) for clamp in (None, 8.0))
    along = (v * (v_bar - v)).sum((-1, -2)).abs()
    rest = v[:, [0, 2, 3]].square().sum((-1, -2)).sqrt()
    assert ((wild - v_bar + v)[:, 1].norm(dim=-1) > 1e3 * along / rest).all()
    assert ((tame - v_bar + v)[:, 1].norm(dim=-1) <= math.exp(4) / 2 * along / rest).all()
    assert (v * tame).sum((-1, -2)).abs().max() < 1e-10  # still tangent
    within = torch.tensor([0.0, -7.9, -3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(project(v, v_bar, within, "evidence", 8.0), project(v, v_bar, within, "evidence"))


@pytest.mark.parametrize("mode", ["per_head", "global", "evidence"])
def test_g12_first_token_is_not_updated(mode):
    v, _, log_evidence = draw(0)
    assert project(v, v.clone(), log_evidence, mode).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_evidence_and_an_empty_head_stay_finite_and_tangent(dtype):
    v, v_bar, _ = (x.to(dtype) for x in draw(3))
    v[:, 2] = 0.0
    v.requires_grad_()
    log_evidence = torch.tensor([1e4, -1e4, -2e4, 3.0], dtype=dtype)
    update = project(v, v_bar, log_evidence, "evidence")
    assert update.isfinite().all()
    assert (v * update).sum((-1, -2)).abs().max() < 1e-3
    (gradient,) = torch.autograd.grad(update.square().sum(), v)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", ["per_head", "global", "evidence"])
def test_projections_pass_gradcheck(mode):
    inputs = [x[:1].clone().requires_grad_() for x in draw(1)]
    assert torch.autograd.gradcheck(lambda v, b, e: project(v, b, e, mode), inputs)


def test_wrong_use_says_what_to_do():
    v = unit(0, H, W)
    with pytest.raises(ValueError, match="log_evidence"):
        project(v, v, mode="evidence")
    with pytest.raises(ValueError, match="none, per_head, global, evidence"):
        project(v, v, mode="both")
