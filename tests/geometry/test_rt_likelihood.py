"""The RT likelihood: G3-G6, R1, R2, E8, E21, and the separability lemma H6 with its limits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.geometry.likelihood import (
    correlation,
    decoupled_radial_likelihood,
    directional_least_squares,
    directional_least_squares_by_head,
    radial_consensus,
    radial_likelihood,
    rt_likelihood,
    squared_chord,
    tangent_step,
    tangential_likelihood,
)
from polarlm.geometry.sphere import mean_direction, normalise, tangential_part
from tests.geometry.geometry_draws import for_all_seeds, normal, order_of, positive, unit, weights

D, S = 8, 5


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), field=st.sampled_from(["real", "complex"]))
def test_g3_likelihood_is_radial_plus_tangential_exactly(seed, field):
    m, u, x = positive(seed), unit(seed + 1, D), normal(seed + 2, S, D)
    radial, tangential = positive(seed + 3, S), positive(seed + 4, S)
    whole = rt_likelihood(m, u, x, radial, tangential, field)
    parts = radial_likelihood(m, u, x, radial, field) + tangential_likelihood(u, x, tangential, field)
    torch.testing.assert_close(whole, parts)
    swapped = radial_likelihood(m, u, x, tangential, field) + tangential_likelihood(u, x, radial, field)
    assert not torch.allclose(whole, swapped)


@for_all_seeds
def test_g3_terms_are_the_printed_ones(seed):
    m, u, x, radial, tangential = positive(seed), unit(seed + 1, D), normal(seed + 2, S, D), 0.3, 0.7
    m_j = x.norm(dim=-1)
    for field in ("real", "complex"):
        c = correlation(u, x / m_j[:, None], field)
        torch.testing.assert_close(radial_likelihood(m, u, x, radial, field), ((m_j * c - m).abs() ** 2 / radial).sum())
        torch.testing.assert_close(
            tangential_likelihood(u, x, tangential, field), (m_j**2 / tangential * (1 - c.abs() ** 2)).sum()
        )


def neighbours(seed: int, eps: float, m: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Observations at relative distance eps of the state: the local-consensus regime."""
    return m * (u + eps * unit(seed, S, D))


def decoupling_error(m, u, x, variance, field="real") -> torch.Tensor:
    """L(m, u) - [L_R(m) + L_T(u)] with tangential variance half the radial one."""
    decoupled = decoupled_radial_likelihood(m, x, variance) + tangential_likelihood(u, x, 0.5 * variance, field)
    return rt_likelihood(m, u, x, variance, 0.5 * variance, field) - decoupled


@for_all_seeds
def test_g4_decoupling_remainder_is_third_order_in_real_geometry(seed):
    """E8: with the real projector Prop. 4 says something (error O(eps^3), the likelihood itself is O(eps^2))."""
    m, u, variance = positive(seed), unit(seed + 1, D), positive(seed + 2, S)

    def remainder(eps):
        x = neighbours(seed + 3, eps, m, u)
        return sum(decoupling_error(m, u, x[j : j + 1], variance[j]).abs() for j in range(S))

    assert abs(order_of(remainder) - 3) < 0.1
    assert (
        abs(order_of(lambda e: rt_likelihood(m, u, neighbours(seed + 3, e, m, u), variance, 0.5 * variance)) - 2) < 0.1
    )


@for_all_seeds
def test_g4_complex_projector_makes_the_statement_vacuous(seed):
    """E8: the phase term Im(u^dagger u_j)^2 is counted as radial, and the remainder is as large as the likelihood."""
    m, u, variance = positive(seed), unit(seed + 1, D), positive(seed + 2, S)

    def remainder(eps):
        x = neighbours(seed + 3, eps, m, u)
        return sum(decoupling_error(m, u, x[j : j + 1], variance[j], "complex").abs() for j in range(S))

    assert abs(order_of(remainder, (1e-3, 3e-4, 1e-4)) - 2) < 0.2
    x = neighbours(seed + 3, 1e-5, m, u)
    phase = (correlation(u, x, "complex").imag ** 2 / variance).sum()
    torch.testing.assert_close(remainder(1e-5), phase, rtol=1e-3, atol=0)


@for_all_seeds
def test_g5_gap_between_exact_and_least_squares_tangent_term(seed):
    """kappa (1 - c^2) - kappa ||u - u_j||^2 = -kappa (1 - c)^2: least squares is never the smaller of the two."""
    u, directions, kappa = unit(seed, D), unit(seed + 1, S, D), positive(seed + 2, S)
    gap = tangential_likelihood(u, directions, 1 / kappa) - directional_least_squares(u, directions, kappa)
    torch.testing.assert_close(gap, -(kappa * (1 - correlation(u, directions)) ** 2).sum())


@for_all_seeds
def test_corollary_least_squares_is_the_tangent_term_to_fourth_order(seed):
    """In real geometry the Corollary's O(eps^2) is O(eps^4) (by G5); with the complex projector it is O(eps^2)."""
    u, variance = unit(seed, D), positive(seed + 1, S)

    def gap(eps, field):
        x = normalise(neighbours(seed + 2, eps, torch.tensor(1.0), u))
        return tangential_likelihood(u, x, variance, field) - directional_least_squares(u, x, 1 / variance)

    assert abs(order_of(lambda e: gap(e, "real"), (3e-1, 1e-1, 3e-2)) - 4) < 0.2
    assert abs(order_of(lambda e: gap(e, "complex"), (1e-3, 3e-4, 1e-4)) - 2) < 0.2


@for_all_seeds
def test_g6_least_squares_minimiser_is_the_consensus(seed):
    directions, kappa = unit(seed, S, D), positive(seed + 1, S)
    a = kappa / kappa.sum()
    u_bar = mean_direction(a, directions).requires_grad_()
    (gradient,) = torch.autograd.grad(directional_least_squares(u_bar, directions, kappa), u_bar)
    assert gradient.norm() < 1e-12


@for_all_seeds
def test_g6_tangent_constrained_minimiser_is_the_projected_step(seed):
    """argmin over tangent Delta of sum kappa ||Delta - (u_j - u)||^2, by brute force in a tangent basis."""
    u, directions, kappa = unit(seed, D), unit(seed + 1, S, D), positive(seed + 2, S)
    basis = torch.linalg.svd(u[None]).Vh[1:]  # (D-1, D), orthonormal, orthogonal to u
    a = (kappa.sqrt()[:, None, None] * basis.T).reshape(S * D, D - 1)
    b = (kappa.sqrt()[:, None] * (directions - u)).reshape(S * D)
    brute = basis.T @ torch.linalg.lstsq(a, b).solution
    step = tangent_step(u, mean_direction(kappa / kappa.sum(), directions))
    torch.testing.assert_close(step, brute)
    torch.testing.assert_close(step, tangential_part(u, mean_direction(kappa / kappa.sum(), directions)))


@for_all_seeds
def test_removed_radial_component_is_second_order(seed):
    """Section 3.4: P_T(u_bar - u) = u_bar - u + O(eps^2)."""
    u = unit(seed, D)

    def removed(eps):
        u_bar = normalise(neighbours(seed + 1, eps, torch.tensor(1.0), u)).mean(0)
        return (tangent_step(u, u_bar) - (u_bar - u)).norm()

    assert abs(order_of(removed) - 2) < 0.1


@for_all_seeds
def test_r2_consensus_magnitude_zeroes_the_radial_gradient(seed):
    u, x, rho = unit(seed, D), normal(seed + 1, S, D), positive(seed + 2, S)
    m_j = x.norm(dim=-1)
    c = correlation(u, x / m_j[:, None])
    assert (c.abs() <= 1).all()
    m_bar = radial_consensus(rho / rho.sum(), c, m_j).requires_grad_()
    (gradient,) = torch.autograd.grad(radial_likelihood(m_bar, u, x, 1 / rho), m_bar)
    assert gradient.abs() < 1e-12


@for_all_seeds
def test_r2_unnormalised_correlation_is_too_large_by_the_squared_radius(seed):
    """E2: Algorithm 1 uses C = <q, k> of vectors at radius r where the cosine belongs."""
    r, a, m = 3.0, weights(seed, S), positive(seed + 1, S)
    u, directions = unit(seed + 2, D), unit(seed + 3, S, D)
    cosine, printed = correlation(u, directions), correlation(r * u, r * directions)
    torch.testing.assert_close(radial_consensus(a, printed, m), r**2 * radial_consensus(a, cosine, m))


@for_all_seeds
def test_r1_equal_magnitudes_in_agreement_leave_the_magnitude(seed):
    a, m = weights(seed, S), torch.full((S,), 1.3, dtype=torch.float64)
    torch.testing.assert_close(radial_consensus(a, torch.ones_like(m), m), m[0])
    assert radial_consensus(a, torch.full_like(m, 0.9), m) < m[0]  # disagreement attenuates


@for_all_seeds
def test_h6_objective_separates_over_heads_and_radii_add_up(seed):
    heads, width = 4, D // 4
    u, directions, kappa = unit(seed, D), unit(seed + 1, S, D), positive(seed + 2, S)
    by_head = directional_least_squares_by_head(
        u.view(heads, width), directions.view(S, heads, width), kappa[:, None].expand(S, heads)
    )
    torch.testing.assert_close(by_head.sum(), directional_least_squares(u, directions, kappa))
    torch.testing.assert_close(u.view(heads, width).square().sum(), u.square().sum())
    # A head's objective sees only its own block.
    moved = u.clone()
    moved[:width] += 1.0
    after = directional_least_squares_by_head(
        moved.view(heads, width), directions.view(S, heads, width), kappa[:, None].expand(S, heads)
    )
    torch.testing.assert_close(after[1:], by_head[1:])
    assert abs(after[0] - by_head[0]) > 1e-3


@for_all_seeds
def test_exact_objective_does_not_separate(seed):
    """App. D.2: |u^dagger u_j|^2 has cross terms between heads that no sum over heads contains."""
    u, x = unit(seed, D), unit(seed + 1, 1, D)
    c = (u * x[0]).view(4, D // 4).sum(-1)
    exact = 1 - tangential_likelihood(u, x, 1.0)
    torch.testing.assert_close(exact, c.square().sum() + (c.sum() ** 2 - c.square().sum()))
    assert abs(exact - c.square().sum()) > 1e-9


def test_squared_chord_never_goes_negative():
    many = unit(0, 400, D).float()
    rounded = 2 * (many * many).sum(-1) - 2 * (many @ many.T).diagonal()
    assert rounded.min() < 0  # so that the clamp has something to do
    assert (squared_chord(many, many) >= 0).all()
    u = many[:6]
    assert squared_chord(u, u).diagonal().max() < 1e-5
    torch.testing.assert_close(squared_chord(u, -u).diagonal(), torch.full((6,), 4.0))
