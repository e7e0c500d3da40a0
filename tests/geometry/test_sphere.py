"""The sphere: projectors (G9), Exp, Log and retraction (G7), geodesics and concentration (G8)."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.geometry import sphere
from polarlm.geometry.transport import to_complex, to_real
from tests.geometry.geometry_draws import for_all_seeds, normal, order_of, unit, weights

D = 10


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), radius=st.floats(1e-3, 1e3), field=st.sampled_from(["real", "complex"]))
def test_g9_projectors_are_orthogonal_projectors_at_any_radius(seed, radius, field):
    u, x, y = radius * unit(seed, D), normal(seed + 1, D), normal(seed + 2, D)
    radial, tangential = sphere.radial_projector(u, field), sphere.tangential_projector(u, field)
    torch.testing.assert_close(tangential @ tangential, tangential)
    torch.testing.assert_close(tangential, tangential.T)
    torch.testing.assert_close(radial @ tangential, torch.zeros(D, D, dtype=u.dtype), atol=1e-12, rtol=0)
    torch.testing.assert_close(radial + tangential, torch.eye(D, dtype=u.dtype))
    torch.testing.assert_close(tangential @ x, sphere.tangential_part(u, x, field))
    torch.testing.assert_close(x @ sphere.tangential_part(u, y, field), sphere.tangential_part(u, x, field) @ y)
    assert sphere.tangential_part(u, u, field).norm() < 1e-12 * radius
    assert abs(u @ sphere.tangential_part(u, x, field)) < 1e-12 * radius * x.norm()
    assert torch.linalg.matrix_rank(tangential) == D - (1 if field == "real" else 2)


@for_all_seeds
def test_e7_only_the_real_projector_is_the_tangent_space(seed):
    """Turning the phase of u moves along the sphere; the complex projector forbids exactly that direction."""
    u = unit(seed, D)
    phase = to_real(1j * to_complex(u))
    assert abs(u @ phase) < 1e-12
    torch.testing.assert_close(sphere.tangential_part(u, phase), phase)
    assert sphere.tangential_part(u, phase, "complex").norm() < 1e-12


def test_e6_the_projector_without_its_division_is_wrong_off_the_unit_sphere():
    u, x = 3.0 * unit(0, D), normal(1, D)
    unscaled = x - u * (u @ x)
    assert abs(u @ unscaled) > 0.1
    assert abs(u @ sphere.tangential_part(u, x)) < 1e-12


@for_all_seeds
def test_exp_and_log_are_inverse_and_stay_on_the_sphere(seed):
    r = 2.0
    u, target = r * unit(seed, D), r * unit(seed + 1, D)
    step = sphere.log_map(u, target)
    assert abs(u @ step) < 1e-12
    torch.testing.assert_close(step.norm() / r, torch.acos((u @ target) / r**2))
    torch.testing.assert_close(sphere.exp_map(u, step), target)
    small = sphere.tangential_part(u, normal(seed + 2, D))
    small = small * (2.0 / small.norm())  # arc 1 rad: inside the injectivity radius
    torch.testing.assert_close(sphere.log_map(u, sphere.exp_map(u, small)), small)
    torch.testing.assert_close(sphere.exp_map(u, small).norm(), u.norm())


@for_all_seeds
def test_g7_retraction_is_exp_to_third_order(seed):
    """E9: Exp and Norm differ at O(eps^3), not at the O(eps^2) of the text; with step and antipodal sign alike."""
    u = unit(seed, D)
    w = sphere.normalise(sphere.tangential_part(u, normal(seed + 1, D)))
    for sign in (1, -1):
        order = order_of(lambda e, s=sign: (sphere.exp_map(u, s * e * w) - sphere.retract(u, s * e * w)).norm())
        assert abs(order - 3) < 0.05


@for_all_seeds
def test_retraction_stays_on_the_sphere_of_the_point(seed):
    u = 1.7 * unit(seed, D)
    after = sphere.retract(u, normal(seed + 1, D))
    torch.testing.assert_close(after.norm(), u.norm())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), fraction=st.floats(0, 1))
def test_g8_exp_of_a_fraction_of_log_is_slerp(seed, fraction):
    u, target = 1.7 * unit(seed, D), normal(seed + 1, D)
    expected = sphere.slerp(u, target, fraction)
    torch.testing.assert_close(sphere.exp_map(u, fraction * sphere.log_map(u, target)), expected)
    reached = sphere.angle_between(u, expected)
    torch.testing.assert_close(reached, fraction * sphere.angle_between(u, target), atol=1e-7, rtol=0)


def test_slerp_between_equal_directions_is_still():
    u = unit(0, 3, D)
    torch.testing.assert_close(sphere.slerp(u, 2 * u, 0.4), u)


@for_all_seeds
def test_g8_mean_resultant_length_measures_agreement(seed):
    directions, a = unit(seed, 6, D), weights(seed + 1, 6)
    length = sphere.mean_resultant_length(sphere.mean_direction(a, directions))
    assert 0 <= length < 1
    same = directions[:1].expand(6, D)
    torch.testing.assert_close(
        sphere.mean_resultant_length(sphere.mean_direction(a, same)), torch.tensor(1.0, dtype=a.dtype)
    )
    opposite = torch.stack((directions[0], -directions[0]))
    half = torch.full((2,), 0.5, dtype=a.dtype)
    assert sphere.mean_resultant_length(sphere.mean_direction(half, opposite)) < 1e-15


@for_all_seeds
def test_geodesic_step_is_slerp_at_full_agreement_and_shorter_when_diffuse(seed):
    """App. C.2: Exp_u(alpha ||u_bar|| Log_u(u*)); E29: the factor ||u_bar|| is part of it."""
    u, target = unit(seed, D), unit(seed + 1, D)
    torch.testing.assert_close(sphere.geodesic_step(u, target, 0.6), sphere.slerp(u, target, 0.6))
    moved = sphere.angle_between(u, sphere.geodesic_step(u, 0.25 * target, 0.6))
    torch.testing.assert_close(moved, 0.25 * 0.6 * sphere.angle_between(u, target))


@for_all_seeds
def test_first_order_and_geodesic_step_agree_to_first_order(seed):
    """u + P_T(u_bar - u) and the geodesic step share the tangent direction; both move towards the consensus."""
    u, offset = unit(seed, D), unit(seed + 1, D)

    def gap(eps):
        u_bar = sphere.normalise(u + eps * offset)
        first = sphere.retract(u, sphere.tangential_part(u, u_bar - u))
        return (first - sphere.geodesic_step(u, u_bar)).norm()

    assert order_of(gap) > 2.9
    target = sphere.normalise(u + 0.1 * offset)
    assert sphere.angle_between(sphere.geodesic_step(u, target, 0.5), target) < sphere.angle_between(u, target)


def test_angles_survive_where_acos_fails():
    u = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for tiny in (1e-9, 1e-12):
        p = torch.tensor([math.cos(tiny), math.sin(tiny), 0.0], dtype=torch.float64)
        torch.testing.assert_close(sphere.angle_between(u, p).item(), tiny, rtol=1e-6, atol=0)
        assert torch.acos(u @ p) != tiny
    torch.testing.assert_close(sphere.angle_between(u, -u).item(), math.pi)


def test_log_at_the_point_itself_has_the_projector_as_gradient():
    u = unit(0, D)
    jacobian = torch.autograd.functional.jacobian(lambda p: sphere.log_map(u, p), u.clone())
    torch.testing.assert_close(jacobian, sphere.tangential_projector(u))


def test_maps_pass_gradcheck():
    u, x = normal(0, 2, 4).requires_grad_(), normal(1, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(sphere.log_map, (u, x))
    assert torch.autograd.gradcheck(lambda a, b: sphere.exp_map(a, sphere.tangential_part(a, b)), (u, x))
    assert torch.autograd.gradcheck(lambda a, b: sphere.slerp(a, b, 0.3), (u, x))


@for_all_seeds
def test_geodesic_step_at_any_radius(seed):
    """The angle walked is alpha times concentration times the angle to the mean, whatever the unit of length."""
    radius = 0.3 + seed % 7
    u, mean = unit(seed, 5, 6), 0.6 * unit(seed + 1, 5, 6)
    moved = sphere.geodesic_step(radius * u, radius * mean, 0.5)
    torch.testing.assert_close(moved.norm(dim=-1), torch.full((5,), radius, dtype=torch.float64))
    torch.testing.assert_close(sphere.angle_between(u, moved), 0.5 * 0.6 * sphere.angle_between(u, mean))
    torch.testing.assert_close(moved, radius * sphere.geodesic_step(u, mean, 0.5))
