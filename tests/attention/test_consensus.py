"""Appendix G.1 through the block: limits that relaxed consensus must have."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polarlm.attention import PolarAttention, TokenContext
from polarlm.geometry import rotary_tables
from tests.attention.appendix_g import LENGTH, SHAPE, WIDTH, probed, run, stream, turned_values

NO_FLOORS = dict(m_inf=0.0, mu=0.0)  # the gate is derived without them (E34)


def still(consensus, **switches):
    """Switches under which equal tokens agree in everything: nothing turns with position."""
    return dict(consensus=consensus, rotate_values=False, **NO_FLOORS) | switches


@pytest.mark.parametrize("consensus", ["gate", "complex"])
def test_x3_at_consensus_the_gate_is_open_and_the_block_is_the_main_texts(consensus):
    x = stream(2, 1, WIDTH).expand(2, LENGTH, WIDTH)
    out, record = run(x, **still(consensus))
    torch.testing.assert_close(record["gated_weights"], record["weights"])
    torch.testing.assert_close(out, run(x, **still("none"))[0])


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_x3_near_consensus_the_two_part_at_second_order(projection):
    base, noise = stream(1, 1, WIDTH), stream(1, LENGTH, WIDTH)
    off, size = [], []
    for eps in (1e-2, 1e-3):
        # The Gaussian kernel's w = 1 leaves the gate as the only difference; values agree up to eps.
        updates = [
            run(base + eps * noise, **still(kind, kernel="gaussian", projection=projection))[1]["update"]
            for kind in ("gate", "none")
        ]
        off.append((updates[0] - updates[1]).norm().item())
        size.append(updates[1].norm().item())
    assert 0.9 < math.log10(size[0] / size[1]) < 1.1
    assert 1.9 < math.log10(off[0] / off[1]) < 2.1


def test_x3_isotropic_noise_is_the_euclidean_mean():
    """rho = tau: the gate is m_i/m_j, whatever the angle, and precision times that is a mean of vectors m v."""
    x = stream(1, LENGTH, WIDTH)
    same = dict(eta_tk=0.4, sigma_t0=0.3, eta_rk=0.4, sigma_r0=0.3, kernel="gaussian")
    _, record = run(x, **still("gate", **same))
    m = record["magnitude"]
    gate = (record["gated_weights"] / record["weights"].clamp_min(1e-300))[0, 0].tril()
    torch.testing.assert_close(gate, (m[0, :, None] / m[0, None, :]).tril())


@pytest.mark.parametrize("consensus", ["gate", "none"])
def test_x4_without_radial_precision_directions_are_axes(consensus):
    """A token and its opposite then say the same; in the main text they do not."""
    x = stream(1, LENGTH, WIDTH)
    turned = x.clone()
    turned[:, 3] *= -1
    outputs = [
        run(z, **still(consensus, projection="per_head", radial="none", sigma_r0=1e6, eta_rk=0.0))[0][:, 4:]
        for z in (x, turned)
    ]
    assert torch.allclose(*outputs, rtol=1e-6, atol=1e-9) == (consensus == "gate")


def objective(u, directions, magnitudes, m, rho, tau, field):
    """L_R + L_T of Prop. 3 in a direction u, magnitudes held: rho |m - c m_j|^2 + tau m_j^2 (1 - |c|^2)."""
    modes, others = (torch.complex(*z.chunk(2, dim=-1)) for z in (u, directions))
    c = (modes.conj() * others).sum(-1)
    c = c if field == "complex" else c.real.to(c.dtype)
    apart = (m - c * magnitudes).abs().square()
    return (rho * apart + tau * magnitudes.square() * (1 - c.abs().square())).sum()


@pytest.mark.parametrize("consensus", ["gate", "complex"])
def test_x1_and_x2_the_blocks_step_is_the_damped_newton_step_of_the_objective(consensus):
    """-grad L_D / (2 sum kappa) at the token's own direction, by autograd; the evidence is the metric sum kappa."""
    one_head = replace(SHAPE, n_head=1, n_kv_head=1, head_dim=WIDTH)
    noise = dict(kernel="gaussian", m_inf=0.0, mu=0.1, mu_r=0.05, mu_spread=False, eta_rk=0.9, sigma_r0=0.7)
    _, record = run(stream(1, LENGTH, WIDTH), shape=one_head, consensus=consensus, **noise)
    p, m = record["params"], record["magnitude"][0]
    tables = {name: record[name].numpy() for name in ("rotary_cos", "rotary_sin")}
    v, update = (
        torch.from_numpy(turned_values(tables | {"v": record[n].detach().numpy()}))[0, 0] for n in ("v", "update")
    )
    for i in range(LENGTH):
        lag = i - torch.arange(i + 1)
        rho = 1 / (p["eta_rk"] ** 2 * torch.exp(-2 * p["mu_r"] * lag) + p["sigma_r0"] ** 2)
        tau = 1 / (p["eta_tk"] ** 2 * torch.exp(-2 * p["mu"] * lag) + p["sigma_t0"] ** 2)
        carried = m[: i + 1] * torch.exp(-p["mu"] * lag)
        unit = v[: i + 1] / WIDTH**0.5
        u = unit[i].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(u, unit, carried, m[i], rho, tau, consensus), u)
        tangential = gradient - (gradient @ unit[i]) * unit[i]
        metric = (tau * carried.square()).sum()
        torch.testing.assert_close(update[i], -tangential / (2 * metric) * WIDTH**0.5, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(record["log_evidence"][0, 0, i].exp(), metric)


def test_x2_at_consensus_the_evidence_is_half_the_objectives_curvature():
    one_head = replace(SHAPE, n_head=1, n_kv_head=1, head_dim=WIDTH)
    _, record = run(stream(1, 1, WIDTH).expand(1, LENGTH, WIDTH), shape=one_head, **still("gate", kernel="gaussian"))
    p, m, unit = record["params"], record["magnitude"][0], record["v"][0, 0] / WIDTH**0.5
    rho, tau = (1 / (p[k] ** 2 + p[s] ** 2) for k, s in (("eta_rk", "sigma_r0"), ("eta_tk", "sigma_t0")))
    across = stream(WIDTH)
    across = across - (across @ unit[0]) * unit[0]
    across = across / across.norm()

    def along(t):  # the great circle from the common direction
        return objective(unit[0] * t.cos() + across * t.sin(), unit, m, m[0], rho, tau, "gate")

    curvature = torch.autograd.functional.hessian(along, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(2 * record["log_evidence"][0, 0, -1].exp(), curvature)


def test_x4_complex_axes_keep_every_phase():
    """Without radial precision, a complex correlation makes an observation worth the same at any common phase."""
    x = stream(1, LENGTH, WIDTH)
    switches = dict(radial="none", sigma_r0=1e6, eta_rk=0.0, kernel="gaussian", norm_position="post")
    torch.manual_seed(3)
    mixer = PolarAttention(SHAPE, forgetting="none", **still("complex", **switches)).double()
    outputs = []
    for angle in (0.0, 0.7):
        v = torch.complex(*mixer.v(x).unflatten(-1, (4, 8)).chunk(2, dim=-1)).detach()
        v[:, 3] = v[:, 3] * complex(math.cos(angle), math.sin(angle))
        turned = torch.cat((v.real, v.imag), dim=-1).flatten(-2)
        z = torch.linalg.solve(mixer.v.weight, turned.mT).mT  # the stream whose token 3 has that phase
        tables = rotary_tables(torch.arange(LENGTH), 8, dtype=x.dtype)
        outputs.append(mixer(z, TokenContext(tables, positions=torch.arange(LENGTH)))[:, 4:])
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-9)
    assert outputs[0].norm() > 0.1


def test_the_gates_values_are_dropped_and_its_evidence_is_not():
    torch.manual_seed(0)
    x, tables = torch.randn(1, 64, WIDTH), rotary_tables(torch.arange(64), 8)
    outputs = {}
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        mixer = PolarAttention(replace(SHAPE, dropout=dropout), consensus="gate").train()
        record: dict = {}
        mixer(x, TokenContext(tables, record=record))
        outputs[dropout] = record
    assert (outputs[0.5]["v_bar"] - outputs[0.0]["v_bar"]).abs().max() > 0.1
    torch.testing.assert_close(outputs[0.5]["log_evidence"], outputs[0.0]["log_evidence"])
    torch.testing.assert_close(outputs[0.5]["gated_weights"], outputs[0.0]["gated_weights"])


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_first_token_has_nowhere_to_turn_whatever_the_gate_is(projection):
    noise = dict(m_inf=0.5, sigma_t0=[0.2, 0.4, 0.8, 1.6])  # heads whose gates differ
    for consensus, correlation in (("gate", "qk"), ("gate", "vv"), ("complex", "vv")):
        switches = dict(consensus=consensus, radial_correlation=correlation, projection=projection)
        _, record = run(stream(1, LENGTH, WIDTH), **switches, **noise)
        assert record["update"][:, :, 0].abs().max() < 1e-10


def test_the_probe_shows_gates_as_g1_has_them():
    values, scalars, records = probed(consensus="gate", m_inf=0.0, sigma_r0=2.0, eta_rk=2.0)
    lag = np.arange(10)[:, None] - np.arange(10)
    for layer, (p, seen) in enumerate(zip(scalars, records, strict=True)):
        decay = np.exp(-p["mu"][:, None, None] * lag)
        carried = decay * seen["magnitude"][:, None, None, :]
        rho = 1 / (p["eta_rk"] ** 2 * np.exp(-2 * p.get("mu_r", 0.0) * lag) + p["sigma_r0"] ** 2)
        tau = 1 / ((p["eta_tk"][:, None, None] * decay) ** 2 + p["sigma_t0"][:, None, None] ** 2)
        turned = turned_values(seen)
        unit = turned / np.linalg.norm(turned, axis=-1, keepdims=True)
        cosine = unit @ unit.swapaxes(-1, -2)
        kappa_gate = rho * seen["magnitude"][:, None, :, None] * carried + (tau - rho) * carried**2 * cosine
        gate = np.tril(kappa_gate / (tau * carried**2))
        weights = seen["weights"]
        assert (gate < 0).any()  # both sides of the share are seen
        np.testing.assert_allclose(
            values["precision/gate"][layer], (weights * gate).sum(-1).mean((0, 2)), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            values["precision/gate_negative_share"][layer],
            np.where(gate < 0, weights, 0).sum(-1).mean((0, 2)),
            rtol=1e-4,
            atol=1e-5,
        )
