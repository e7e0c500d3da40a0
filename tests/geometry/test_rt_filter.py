"""The RT model and filter: simulation, agreement with the definition, convergence, robustness, R1 and its negatives."""

import math
import re
from pathlib import Path

import pytest
import torch

from polarlm.geometry import IsotropicFilter, RTFilter, RTModel, angle_between, example, simulate, tangential_part
from polarlm.geometry.robust import causal_mask, student_mle_penalty
from polarlm.geometry.rt_filter import decayed_residual
from polarlm.geometry.sphere import to_polar
from polarlm.geometry.transport import transport, transport_pairwise
from tests.geometry.geometry_draws import normal, unit

MODEL = RTModel(dim=8, mu=0.02, eta_r=0.3, eta_t=0.05)


def error_in_degrees(estimate, data, skip=8):
    return angle_between(data.states, estimate.states)[..., skip:].mean().item() * 180 / math.pi


def relative_error(estimate, data, skip=8):
    distance = (estimate.states - data.states).norm(dim=-1) / data.states.norm(dim=-1)
    return distance[..., skip:].mean().item()


def test_three_lines_recover_a_trajectory():
    data = simulate(MODEL, steps=64, outlier_rate=0.2, seed=0)
    estimate = RTFilter(MODEL)(data.observations)
    error = angle_between(estimate.direction, data.states)[8:].mean() * 180 / math.pi
    raw = angle_between(data.observations, data.states)[8:].mean() * 180 / math.pi
    assert error < 3 and raw > 15


def test_simulated_states_flow_and_noise_splits_radially_and_tangentially():
    model = RTModel(dim=6, mu=0.05, eta_r=0.4, eta_t=0.1)
    data = simulate(model, steps=12, batch=(1000,), seed=1)
    moved = transport(data.states[:, :1], data.times, model.omega, model.mu)
    torch.testing.assert_close(moved, data.states)
    assert (data.states[:, -1].norm(dim=-1) < data.states[:, 0].norm(dim=-1)).all()
    _, u = to_polar(data.states, radius=1.0)
    noise = data.observations - data.states
    radial, tangential = (noise * u).sum(-1), tangential_part(u, noise)
    assert radial.std().item() == pytest.approx(0.4, rel=0.04)
    assert tangential.square().sum(-1).mean().item() == pytest.approx(5 * 0.1**2, rel=0.04)


def test_simulation_is_reproducible_and_outliers_are_what_they_say():
    clean = simulate(MODEL, 40, seed=3)
    torch.testing.assert_close(simulate(MODEL, 40, seed=3).observations, clean.observations)
    assert not torch.equal(simulate(MODEL, 40, seed=4).observations, clean.observations)
    for kind in ("direction", "burst", "gross"):
        data = simulate(MODEL, 40, outlier_rate=0.3, outlier=kind, outlier_scale=10.0, seed=3)
        honest = data.observations[~data.outlier]
        torch.testing.assert_close(honest, clean.observations[~data.outlier])
        wrong, truth = data.observations[data.outlier], data.states[data.outlier]
        ratio = wrong.norm(dim=-1) / truth.norm(dim=-1)
        if kind == "direction":
            torch.testing.assert_close(ratio, torch.ones_like(ratio))
            assert angle_between(truth, wrong).max() > 1
        elif kind == "burst":
            torch.testing.assert_close(wrong, 10 * clean.observations[data.outlier])
        else:
            torch.testing.assert_close(ratio, torch.full_like(ratio, 10.0))


def test_without_noise_the_filter_returns_the_truth():
    data = simulate(MODEL, 20, seed=0)
    for update in ("first_order", "geodesic"):
        for start in ("observation", "median"):
            estimate = RTFilter(MODEL, update=update, start=start)(data.states)
            torch.testing.assert_close(estimate.states, data.states)
            torch.testing.assert_close(estimate.concentration, torch.ones(20, dtype=torch.float64))


def test_one_paper_iteration_is_the_definition_written_out():
    """Section 3.4 with pairwise transport, loops and printed formulas: kappa, kappa~, d^2, A, u_bar, m_bar, update."""
    data = simulate(MODEL, 9, outlier_rate=0.2, seed=5)
    nu_t, nu_r, alpha, beta, m_inf, sigma = 3.0, 2.0, 0.7, 0.4, 0.1, 0.02
    flt = RTFilter(
        MODEL, kernel="student", radial="own", start="observation", iterations=1, nu_t=nu_t, nu_r=nu_r,
        alpha=alpha, beta=beta, m_inf=m_inf, sigma_t0=sigma, sigma_r0=sigma,
    )  # fmt: skip
    estimate = flt(data.observations)
    carried = transport_pairwise(data.observations, data.times, MODEL.omega, MODEL.mu)
    d = MODEL.dim / 2
    for i in range(9):
        x_i = data.observations[i]
        m_i, u_i = x_i.norm(), x_i / x_i.norm()
        directional, radial, directions, magnitudes = [], [], [], []
        for j in range(i + 1):
            x_ij = carried[i, j]
            m_ij, u_ij = x_ij.norm(), x_ij / x_ij.norm()
            e2 = math.exp(-2 * MODEL.mu * (i - j))
            kappa = (m_ij**2 + m_inf**2) / (MODEL.eta_t**2 * e2 + sigma**2)
            kappa_tilde = (m_ij**2 + m_inf**2) / (MODEL.eta_t**2 * e2 + MODEL.eta_t**2 + sigma**2)
            d2 = kappa_tilde * (u_i - u_ij).square().sum()
            directional.append(kappa * (1 + d2 / (nu_t * d)) ** -(nu_t + 1))
            c = u_i @ u_ij
            rho = 1 / (MODEL.eta_r**2 * e2 + sigma**2)
            rho_tilde = 1 / (MODEL.eta_r**2 * e2 + MODEL.eta_r**2 + sigma**2)
            radial.append(rho * (1 + rho_tilde * (c * m_ij - m_i) ** 2 / nu_r) ** -(nu_r + 1))
            directions.append(u_ij)
            magnitudes.append(c * m_ij)
        w, w_r = torch.stack(directional), torch.stack(radial)
        u_bar = (w[:, None] * torch.stack(directions)).sum(0) / w.sum()
        m_bar = (w_r * torch.stack(magnitudes)).sum() / w_r.sum()
        tangent = u_bar - u_i * (u_i @ u_bar)
        expected = x_i + alpha * m_i * tangent + beta * (m_bar - m_i) * u_i
        torch.testing.assert_close(estimate.states[i], expected)
        torch.testing.assert_close(estimate.log_evidence[i], w.sum().log())
        torch.testing.assert_close(estimate.concentration[i], u_bar.norm())


def test_geodesic_and_first_order_updates_share_their_fixed_point():
    data = simulate(MODEL, 30, outlier_rate=0.2, seed=2)
    first = RTFilter(MODEL, iterations=60)(data.observations)
    exact = RTFilter(MODEL, iterations=60, update="geodesic")(data.observations)
    torch.testing.assert_close(first.states, exact.states, rtol=1e-5, atol=1e-6)
    one = RTFilter(MODEL, iterations=1)(data.observations)
    other = RTFilter(MODEL, iterations=1, update="geodesic")(data.observations)
    assert (one.states - other.states).abs().max() > 1e-4  # they are different paths


def test_iterated_reweighting_reaches_a_stationary_point_of_the_robust_objective():
    """App. E, IRLS: at the limit the Riemannian gradient of sum_j rho(kappa_ij ||u - u_ij||^2) is zero."""
    data = simulate(MODEL, 25, outlier_rate=0.2, seed=6)
    carried = transport_pairwise(data.observations, data.times, MODEL.omega, MODEL.mu)[-1]
    m_ij, u_ij = to_polar(carried, radius=1.0)
    variance = MODEL.eta_t**2 * torch.exp(-2 * MODEL.mu * (24 - data.times))

    def slope(iterations):
        u = RTFilter(MODEL, iterations=iterations)(data.observations).direction[-1].requires_grad_()
        s = m_ij**2 / variance * (u - u_ij).square().sum(-1)
        objective = student_mle_penalty(s, 4.0 * MODEL.dim / 2).sum()
        (gradient,) = torch.autograd.grad(objective, u)
        return tangential_part(u.detach(), gradient).norm()

    assert slope(80) < 1e-6 * slope(1)


def test_the_future_does_not_change_the_past():
    data = simulate(MODEL, 16, outlier_rate=0.1, seed=7)
    changed = data.observations.clone()
    changed[10:] = normal(0, 6, 8)
    before, after = RTFilter(MODEL)(data.observations), RTFilter(MODEL)(changed)
    torch.testing.assert_close(after.states[:10], before.states[:10])
    assert after.directional_weights.triu(1).abs().max() == 0
    assert (after.states[10:] - before.states[10:]).abs().max() > 0.01


def test_r1_radial_channel_is_still_when_magnitudes_agree_and_when_beta_is_zero():
    model = RTModel(dim=8, mu=0.0)
    constant = transport(1.7 * unit(0, 1, 8), torch.arange(10, dtype=torch.float64), model.omega)
    torch.testing.assert_close(RTFilter(model)(constant).magnitude, torch.full((10,), 1.7, dtype=torch.float64))
    noisy = simulate(model, 10, seed=1).observations
    frozen = RTFilter(model, beta=0.0, update="geodesic", start="observation")(noisy)
    torch.testing.assert_close(frozen.magnitude, noisy.norm(dim=-1))


def test_e20_disagreement_shrinks_the_magnitude_unless_influence_is_joint():
    """Directional outliers have c near 0 and pull m_bar down in the radial channel of App. C."""
    data = simulate(MODEL, 48, batch=(12,), outlier_rate=0.3, seed=8)
    own = RTFilter(MODEL, radial="own")(data.observations)
    joint = RTFilter(MODEL, radial="joint")(data.observations)
    truth = data.states.norm(dim=-1)
    bias_own = ((own.magnitude - truth) / truth)[:, 16:].mean()
    bias_joint = ((joint.magnitude - truth) / truth)[:, 16:].mean()
    assert bias_own < -0.1 and abs(bias_joint) < 0.04


def test_shared_directional_weights_overstate_the_magnitude():
    """kappa grows with m^2, so reusing A_T for magnitudes favours the ones that were measured too large."""
    data = simulate(MODEL, 48, batch=(12,), seed=8)
    truth = data.states.norm(dim=-1)
    shared = RTFilter(MODEL, radial="shared")(data.observations)
    assert ((shared.magnitude - truth) / truth)[:, 16:].mean() > 0.1


def test_outliers_hurt_it_less_than_isotropic_filtering():
    """The claim of docs/rt_filter.md at test size: directional outliers, radial noise larger than tangential."""
    data = simulate(MODEL, 48, batch=(16,), outlier_rate=0.2, seed=9)
    rt = RTFilter(MODEL)(data.observations)
    robust, plain = (
        IsotropicFilter(MODEL)(data.observations),
        IsotropicFilter(MODEL, kernel="gaussian")(data.observations),
    )
    assert error_in_degrees(rt, data) < 0.9 * error_in_degrees(robust, data)
    assert error_in_degrees(rt, data) < 0.5 * error_in_degrees(plain, data)
    assert relative_error(rt, data) < 0.9 * relative_error(robust, data)
    assert relative_error(rt, data) < 0.5 * relative_error(plain, data)
    on_outliers = (rt.directional_weights * data.outlier.unsqueeze(-2)).sum(-1)[:, 8:].mean()
    assert on_outliers < 0.05  # of a fifth of the measurements


def test_an_outlier_captures_the_papers_query_but_not_the_median():
    data = simulate(MODEL, 48, batch=(12,), outlier_rate=0.2, outlier="gross", seed=10)
    query = RTFilter(MODEL, start="observation")(data.observations)
    median = RTFilter(MODEL, start="median")(data.observations)
    assert error_in_degrees(median, data) < 0.5 * error_in_degrees(query, data)


def test_observation_matrix_is_undone():
    mixing = torch.eye(8, dtype=torch.float64) + 0.3 * normal(0, 8, 8)
    seen = RTModel(dim=8, mu=0.02, eta_r=0.3, eta_t=0.05, observation=mixing)
    plain, mixed = simulate(MODEL, 12, seed=1), simulate(seen, 12, seed=1)
    assert not torch.allclose(plain.observations, mixed.observations)
    torch.testing.assert_close(RTFilter(seen)(mixed.observations).states, RTFilter(MODEL)(plain.observations).states)


def test_isotropic_gaussian_filter_is_weighted_least_squares():
    """App. A: x_bar = (sum P)^-1 sum P x_ij with P = 1/Sigma(lag), process noise included."""
    data = simulate(MODEL, 10, seed=2)
    flt = IsotropicFilter(MODEL, kernel="gaussian", eta=0.2, sigma=0.3, sigma0=0.1, iterations=1)
    estimate = flt(data.observations)
    carried = transport_pairwise(data.observations, data.times, MODEL.omega, MODEL.mu)
    lag = data.times[:, None] - data.times
    e2 = torch.exp(-2 * MODEL.mu * lag)
    precision = 1 / (0.3**2 / (2 * MODEL.mu) * (1 - e2) + 0.2**2 * e2 + 0.1**2) * causal_mask(10)
    expected = torch.einsum("ij,ijd->id", precision, carried) / precision.sum(-1, keepdim=True)
    torch.testing.assert_close(estimate.states, expected)
    torch.testing.assert_close(estimate.log_evidence, precision.sum(-1).log())


def test_isotropic_residual_is_the_distance_to_the_decayed_key():
    q, k, decay = normal(0, 4, 6), normal(1, 5, 6), torch.rand(4, 5, dtype=torch.float64)
    expected = (q[:, None] - decay[..., None] * k).square().sum(-1)
    torch.testing.assert_close(decayed_residual(q, k, decay), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"update": "exact"}, "geodesic"),
        ({"start": "zero"}, "median"),
        ({"radial": "off"}, "joint"),
        ({"iterations": 0}, "1"),
    ],
)
def test_filter_refuses_unknown_choices(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RTFilter(MODEL, **kwargs)


def test_model_and_simulation_refuse_nonsense():
    with pytest.raises(ValueError, match="even"):
        RTModel(dim=7)
    with pytest.raises(ValueError, match="frequencies"):
        RTModel(dim=8, frequencies=torch.ones(3))
    with pytest.raises(ValueError, match="eta_r"):
        RTModel(eta_r=0.0)
    with pytest.raises(ValueError, match="direction, burst, gross"):
        simulate(MODEL, 4, outlier="evil")


def test_documented_lines_run_and_their_example_prints_and_draws(monkeypatch, capsys, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "rt_filter.md").read_text(encoding="utf-8")
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), scope)
    assert scope["error"][8:].mean() * 180 / math.pi < 3

    monkeypatch.setattr(example, "TRAJECTORIES", 3)
    monkeypatch.setattr(example, "SETTINGS", {"wrong way": example.SETTINGS["wrong way"]})
    monkeypatch.setattr(example, "STEPS", 44)
    example.main(str(tmp_path / "picture.png"))
    printed = capsys.readouterr().out
    assert printed.count("RT (default)") == 3 and "nan" not in printed
    assert (tmp_path / "picture.png").stat().st_size > 10_000
