"""The directional objective beyond local consensus: X1 (objective, gradient), X2 (gate, Hessian), X3, X4 (limits)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.geometry.likelihood import (
    directional_gradient,
    directional_hessian,
    directional_objective,
    directional_terms,
    gated_precision,
    gated_step,
    gated_sum,
    radial_likelihood,
    tangent_step,
    tangential_likelihood,
)
from polarlm.geometry.sphere import exp_map, normalise, tangential_part
from tests.geometry.geometry_draws import for_all_seeds, normal, order_of, positive, unit

D, S = 8, 5


def draw(seed: int) -> dict[str, torch.Tensor]:
    """m, then directions, magnitudes and both precisions of S observations."""
    return {
        "m": positive(seed),
        "directions": unit(seed + 1, S, D),
        "magnitudes": positive(seed + 2, S),
        "rho": positive(seed + 3, S),
        "tau": 2.0 * positive(seed + 4, S),
    }


def for_both_fields(test):
    """Run a test(seed, field) on many draws of either geometry."""
    given_both = given(seed=st.integers(0, 10**6), field=st.sampled_from(["real", "complex"]))
    return settings(max_examples=20, deadline=None, derandomize=True)(given_both(test))


def likelihood(u: torch.Tensor, case: dict[str, torch.Tensor], field: str) -> torch.Tensor:
    """L_R + L_T of Prop. 3 at the held magnitude."""
    x = case["magnitudes"].unsqueeze(-1) * case["directions"]
    radial = radial_likelihood(case["m"], u, x, 1 / case["rho"], field)
    return radial + tangential_likelihood(u, x, 1 / case["tau"], field)


@for_both_fields
def test_x1_objective_is_the_likelihood_up_to_a_constant_on_the_sphere(seed, field):
    case = draw(seed)
    h, J = directional_terms(**case, field=field)
    points = unit(seed + 5, 6, D)
    gap = torch.stack([likelihood(u, case, field) - directional_objective(u, h, J) for u in points])
    torch.testing.assert_close(gap, gap[:1].expand_as(gap))
    off = 1.3 * points[0]  # the constant uses |u| = 1
    assert not torch.isclose(likelihood(off, case, field) - directional_objective(off, h, J), gap[0])


@for_both_fields
def test_x1_gradient_is_the_projected_one(seed, field):
    case, u, step = draw(seed), unit(seed + 5, D), normal(seed + 6, D)
    h, J = directional_terms(**case, field=field)
    gradient = directional_gradient(u, h, J)
    step = tangential_part(u, step)
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(likelihood(exp_map(u, zero * step), case, field), zero)
    torch.testing.assert_close((gradient * step).sum(), slope)
    assert (gradient * u).sum().abs() < 1e-10


@for_all_seeds
def test_x1_a_complex_projector_would_lose_the_slope_along_the_phase(seed):
    """E7: L_D feels a common phase through Re(u^dagger h), so the tangent space may not drop the direction i u."""
    case, u = draw(seed), unit(seed + 5, D)
    h, J = directional_terms(**case, field="complex")
    complex_gradient = -2.0 * tangential_part(u, h + J @ u, "complex")
    assert (complex_gradient - directional_gradient(u, h, J)).norm() > 1e-2


@for_both_fields
def test_x2_gated_sum_is_the_euclidean_gradient(seed, field):
    case, u = draw(seed), unit(seed + 5, D)
    h, J = directional_terms(**case, field=field)
    gated = gated_precision(u=u, **case, field=field)
    torch.testing.assert_close(gated_sum(gated, case["directions"]), h + J @ u)
    kappa = case["tau"] * case["magnitudes"] ** 2
    a = 1 - case["rho"] / case["tau"]
    correlation = gated_precision(u=u, **case | {"m": 0 * case["m"]}, field=field) / (kappa * a)  # u_j^dagger u
    torch.testing.assert_close(gated / kappa, (1 - a) * case["m"] / case["magnitudes"] + a * correlation)


@for_both_fields
def test_x2_hessian_is_the_second_derivative_along_geodesics(seed, field):
    case, u, step = draw(seed), unit(seed + 5, D), normal(seed + 6, D)
    h, J = directional_terms(**case, field=field)
    step = tangential_part(u, step)
    speed = step.norm()

    def along(t: torch.Tensor) -> torch.Tensor:  # the great circle through u with velocity `step`
        return likelihood(u * (speed * t).cos() + step / speed * (speed * t).sin(), case, field)

    second = torch.autograd.functional.hessian(along, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close((step * directional_hessian(u, h, J, step)).sum(), second)
    other = tangential_part(u, normal(seed + 7, D))  # self-adjoint, and blind to what is not tangent
    left, right = directional_hessian(u, h, J, step), directional_hessian(u, h, J, other)
    torch.testing.assert_close((other * left).sum(), (step * right).sum())
    torch.testing.assert_close(directional_hessian(u, h, J, step + 3.0 * u), left)


@for_both_fields
def test_gated_step_goes_down_everywhere(seed, field):
    case, u = draw(seed), unit(seed + 5, D)
    h, J = directional_terms(**case, field=field)
    kappa = case["tau"] * case["magnitudes"] ** 2
    step = gated_step(u, gated_precision(u=u, **case, field=field), case["directions"], kappa)
    gradient = directional_gradient(u, h, J)
    torch.testing.assert_close(step, -gradient / (2.0 * kappa.sum()))
    before, after = (directional_objective(point, h, J) for point in (u, exp_map(u, 1e-3 * step)))
    assert after < before


@for_both_fields
def test_x3_at_consensus_the_gate_is_open(seed, field):
    case, u = draw(seed), unit(seed + 5, D)
    case |= {"directions": u.expand(S, D), "magnitudes": case["m"].expand(S)}
    kappa = case["tau"] * case["m"] ** 2
    gated = gated_precision(u=u, **case, field=field)
    torch.testing.assert_close(gated, kappa.to(gated.dtype))


@for_all_seeds
def test_x3_near_consensus_it_is_the_main_texts_step(seed):
    case, u = draw(seed), unit(seed + 5, D)
    case["magnitudes"] = case["m"].expand(S)
    kappa = case["tau"] * case["magnitudes"] ** 2

    def gap(eps: float) -> torch.Tensor:
        directions = normalise(u + eps * normal(seed + 6, S, D))
        gated = gated_precision(u=u, **case | {"directions": directions})
        main = tangent_step(u, (kappa.unsqueeze(-1) * directions).sum(0) / kappa.sum())
        return (gated_step(u, gated, directions, kappa) - main).norm()

    assert order_of(gap) == pytest.approx(3.0, abs=0.1)  # g = 1 + O(eps^2), and the step itself is O(eps)


@for_all_seeds
def test_x3_metric_is_isotropic_to_second_order_in_angle_but_only_first_in_magnitude(seed):
    """The text's O(eps^2) needs equal magnitudes: s holds rho m m_j, which is off by rho m_j (m - m_j)."""
    base, u = draw(seed), unit(seed + 5, D)
    step = tangential_part(u, normal(seed + 6, D))

    def gap(angle: float, radial: float, field: str = "real") -> torch.Tensor:
        directions = normalise(u + angle * normal(seed + 7, S, D))
        case = base | {"directions": directions, "magnitudes": base["m"] * (1 + radial * positive(seed + 8, S))}
        kappa = case["tau"] * case["magnitudes"] ** 2
        return (directional_hessian(u, *directional_terms(**case, field=field), step) - 2 * kappa.sum() * step).norm()

    assert order_of(lambda eps: gap(eps, 0.0)) == pytest.approx(2.0, abs=0.1)
    assert order_of(lambda eps: gap(0.0, eps)) == pytest.approx(1.0, abs=0.1)
    # E7 once more: u_j u_j^dagger moves the tangent direction i u, so in complex geometry it is not isotropic at all
    assert gap(1e-3, 0.0, "complex") > 1e-2


@for_both_fields
def test_x3_isotropic_noise_is_euclidean_averaging(seed, field):
    case, u = draw(seed), unit(seed + 5, D)
    case["tau"] = case["rho"]
    h, J = directional_terms(**case, field=field)
    assert J.abs().max() < 1e-12
    gated = gated_precision(u=u, **case, field=field)
    torch.testing.assert_close(gated.real, case["rho"] * case["m"] * case["magnitudes"])
    mean = (case["rho"].unsqueeze(-1) * case["magnitudes"].unsqueeze(-1) * case["directions"]).sum(0)
    best = normalise(mean)  # the direction of the precision-weighted mean of the x_j
    assert directional_gradient(best, h, J).abs().max() < 1e-10
    assert directional_objective(best, h, J) <= directional_objective(u, h, J)


@for_both_fields
def test_x4_without_radial_precision_directions_are_axes(seed, field):
    case, u = draw(seed), unit(seed + 5, D)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64).unsqueeze(-1)

    def pull(rho_scale: float, flip: bool) -> torch.Tensor:
        directions = case["directions"] * (signs if flip else 1.0)
        changed = case | {"rho": rho_scale * case["rho"], "directions": directions}
        return gated_sum(gated_precision(u=u, **changed, field=field), directions)

    torch.testing.assert_close(pull(0.0, True), pull(0.0, False))
    assert (pull(1.0, True) - pull(1.0, False)).norm() > 1e-2  # the first term knows the sign
    assert order_of(lambda eps: (pull(eps, True) - pull(eps, False)).norm()) == pytest.approx(1.0, abs=0.01)
