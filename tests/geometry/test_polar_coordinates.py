"""Polar coordinates: x = m v both ways, in RMS units the differential, magnitude growth (App. E)."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.geometry.sphere import from_polar, polar_differential, polar_update, tangential_part, to_polar
from tests.geometry.geometry_draws import for_all_seeds, normal, order_of, positive, unit

D = 12


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-150, 1e150), radius=st.sampled_from([None, 1.0, 0.5, 9.0]))
def test_polar_coordinates_invert_each_other(seed, scale, radius):
    x = scale * normal(seed, 5, D)
    m, v = to_polar(x, radius)
    torch.testing.assert_close(from_polar(m, v), x, rtol=1e-13, atol=0.0)
    r = math.sqrt(D) if radius is None else radius
    torch.testing.assert_close(v.norm(dim=-1), torch.full((5,), r, dtype=x.dtype))
    m2, v2 = to_polar(from_polar(m, v), radius)
    torch.testing.assert_close((m2, v2), (m, v), rtol=1e-13, atol=0.0)


def test_g12_magnitude_is_the_rms_and_direction_has_rms_one():
    x = normal(0, 5, D)
    m, v = to_polar(x)
    torch.testing.assert_close(m, x.square().mean(-1).sqrt())
    torch.testing.assert_close(v.square().mean(-1), torch.ones(5, dtype=x.dtype))


def test_zero_vector_has_magnitude_zero_and_finite_gradient():
    x = torch.zeros(2, D, dtype=torch.float64, requires_grad=True)
    m, v = to_polar(x)
    assert m.abs().max() == 0 and v.abs().max() == 0
    from_polar(m, v).sum().backward()
    assert x.grad.isfinite().all()


@for_all_seeds
def test_differential_of_the_embedding(seed):
    """dx = v dm + m dv, the E5 resolution: with v at sqrt(D) and m in RMS units no factor 1/r appears."""
    m, v = to_polar(normal(seed, D))
    dm, dv = normal(seed + 1), normal(seed + 2, D)
    _, dx = torch.func.jvp(from_polar, (m, v), (dm, dv))
    torch.testing.assert_close(polar_differential(m, v, dm, dv), dx)
    torch.testing.assert_close(polar_update(m, v, dm, dv, alpha=0.3, beta=0.7), m * v + 0.3 * m * dv + 0.7 * dm * v)


@for_all_seeds
def test_differential_at_another_radius_needs_the_factor(seed):
    """At radius r the paper's F(m, u) = m u / r with m = ||x||: rescaling both by sqrt(D)/r gives the same step."""
    x, r = normal(seed, D), 3.0
    (m, v), (norm, unit_v) = to_polar(x), to_polar(x, 1.0)
    u, dm, du = r * unit_v, normal(seed + 1), normal(seed + 2, D)
    papers = u / r * dm + norm / r * du
    ours = polar_differential(m, v, dm / math.sqrt(D), du * math.sqrt(D) / r)
    torch.testing.assert_close(ours, papers)


@for_all_seeds
def test_g10_tangent_step_grows_only_at_second_order_and_exactly_so(seed):
    """||x + P_T w||^2 = ||x||^2 + ||P_T w||^2: E10, the growth is not removed "exactly" but to first order."""
    x, w = normal(seed, D), normal(seed + 1, D)
    step = tangential_part(x, w)
    torch.testing.assert_close((x + step).square().sum(), x.square().sum() + step.square().sum())
    assert abs(order_of(lambda e: (x + e * step).norm() - x.norm()) - 2) < 0.05


@for_all_seeds
def test_g10_unprojected_growth_is_proportional_to_agreement(seed):
    """App. E: m+ - m = (alpha/r^2) <u, u_bar> + O(alpha^2) for ||u|| = r."""
    r, m = 2.5, positive(seed)
    u, u_bar = r * unit(seed + 1, D), normal(seed + 2, D)

    def error(alpha):
        return ((m * u + alpha * u_bar).norm() / r - m) - alpha / r**2 * (u @ u_bar)

    assert abs(order_of(error) - 2) < 0.1
    assert ((m * u + 1e-6 * u).norm() / r > m) and ((m * u - 1e-6 * u).norm() / r < m)
