"""Appendix G.1 and G.3, ties and projections through the block: limits that each switch must have."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polarlm.attention import ExclusiveAttention, MixerShape, PolarAttention, StandardAttention, TokenContext, polar
from polarlm.attention.tied_output import make_orthonormal
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.geometry.uncertainty import carry_to_next_layer, fused_update
from polarlm.model import GPT, GPTConfig

LENGTH, WIDTH = 9, 32
SHAPE = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=4, head_dim=8, layer=0, n_layer=2)
NO_FLOORS = dict(m_inf=0.0, mu=0.0)  # the gate is derived without them (E34)


def run(x, seed=3, context=None, shape=SHAPE, **switches):
    torch.manual_seed(seed)
    mixer = PolarAttention(shape, **{"forgetting": "none"} | switches).to(x.dtype)  # the paper has none
    record: dict = {}
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim, dtype=x.dtype)
    positions = torch.arange(x.shape[1])
    out = mixer(x, TokenContext(tables, record=record, positions=positions, shared=context or {}))
    return out.detach(), record


def stream(*shape):
    return torch.randn(*shape, dtype=torch.float64)


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


CARRY = dict(uncertainty="carry", prior_share=0.4, widen_q=0.3, context_power=0.3, relax_b=0.2)


def test_u1_the_priors_share_decides_how_far_a_token_steps():
    x = stream(2, LENGTH, WIDTH)
    plain, _ = run(x, projection="evidence")
    believed = dict(uncertainty="carry", widen_q=0.0, context_power=0.0, projection="evidence")
    torch.testing.assert_close(run(x, prior_share=0.0, **believed)[0], plain)  # no prior: the main text
    _, record = run(x, prior_share=1 - 1e-9, **believed)
    assert record["fusion_step"].max() < 1e-6 and record["update"].abs().max() < 1e-5
    _, record = run(x, **CARRY)
    before, after = record["log_prior_precision"], record["log_posterior_precision"]
    attended = record["log_evidence"] - 0.3 * torch.arange(1, LENGTH + 1).log()
    assert (after <= torch.maximum(before, attended) + 1e-9).all() and (after >= torch.minimum(before, attended)).all()
    expected = 0.6 * attended.exp() / (0.4 * before.exp() + 0.6 * attended.exp())
    torch.testing.assert_close(record["fusion_step"], expected, rtol=1e-6, atol=1e-8)


def test_u2_fusion_with_tangency_is_proposition_5_of_the_damped_step():
    x = stream(2, LENGTH, WIDTH)
    _, record = run(x, **CARRY, projection="evidence", radial="none", evidence_clamp=None)
    v, v_bar, update = (record[name].transpose(1, 2) for name in ("v", "v_bar", "update"))
    attended = record["log_evidence"] - 0.3 * torch.arange(1, LENGTH + 1).log()
    prior = record["log_prior_precision"].transpose(1, 2)
    torch.testing.assert_close(
        update, fused_update(v, v_bar, prior, attended.transpose(1, 2), 0.4), rtol=1e-6, atol=1e-8
    )
    assert (v * update).sum((-1, -2)).abs().max() < 1e-9


def test_u3_precision_is_relaxed_between_layers_and_widens_the_query():
    x, before = stream(1, LENGTH, WIDTH), stream(1, LENGTH, 4)
    second = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=4, head_dim=8, layer=1, n_layer=2)
    shared = {"log_precision_0": before}
    _, record = run(x, shape=second, context=shared, **CARRY, widen_k=0.2)
    prior = carry_to_next_layer(before, 1.0, 0.2).transpose(1, 2)
    torch.testing.assert_close(record["log_prior_precision"], prior, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(shared["log_precision_1"].transpose(1, 2), record["log_posterior_precision"])
    _, plain = run(x, shape=second)
    of_key = 0.2 / prior.exp()[:, :, None, :]
    wider = 1 / plain["log_kappa_tilde"].exp() + 0.3 / prior.exp()[..., None] + of_key
    torch.testing.assert_close(1 / record["log_kappa_tilde"].exp(), wider, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(1 / record["log_kappa"].exp(), 1 / plain["log_kappa"].exp() + of_key, rtol=1e-6, atol=0)


def test_e33_an_uncertain_query_has_the_variance_of_its_angle_times_its_reach():
    """1/kappa~ + c/P- is (eta^2 + c m^2/P-)/m^2 with the transported m: a squared length, as eta^2 is."""
    noise = dict(m_inf=0.0, mu=0.2, mu_spread=False)
    _, record = run(stream(1, LENGTH, WIDTH), **CARRY, **noise)
    p, lag = record["params"], (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp_min(0)
    decay2 = torch.exp(-2 * p["mu"][:, None, None] * lag)
    carried2 = record["magnitude"][:, None, None, :].square() * decay2
    variance = sum(p[name][:, None, None].square() for name in ("sigma_t0", "eta_tq"))
    variance = variance + p["eta_tk"][:, None, None].square() * decay2
    effective = variance + 0.3 * carried2 / record["log_prior_precision"].exp()[..., None]
    torch.testing.assert_close(record["log_kappa_tilde"].exp(), carried2 / effective, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("switches", [{}, {"consensus": "gate"}, {"kernel": "exponential", "radial": "own"}], ids=str)
def test_one_estimate_per_layer_is_the_block_without_iteration(switches, monkeypatch):
    x, calls = stream(1, LENGTH, WIDTH), []
    estimate = polar.robust_attention
    monkeypatch.setattr(polar, "robust_attention", lambda *given: calls.append(given[0]) or estimate(*given))
    assert torch.equal(run(x, irls_steps=1, **switches)[0], run(x, **switches)[0])
    assert len(calls) == 2  # one each
    again, _ = run(x, irls_steps=3, **switches)
    assert len(calls) == 5 and (again - run(x, **switches)[0]).abs().max() > 1e-3
    # Every further one starts from a direction on the same sphere: what the keys said, at the queries' radius.
    first, last = calls[2].q, calls[4].q
    torch.testing.assert_close(last.norm(dim=-1), first.norm(dim=-1))
    assert (last - first).abs().max() > 0.1


def model_of(block=PolarAttention, **switches):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, context=16, d_model=WIDTH, n_layer=3, n_head=4)
    return GPT(config, lambda shape: block(shape, **switches))


def test_precision_passes_through_the_layers_unchanged_where_nothing_changes_it():
    model = model_of(uncertainty="carry", prior_share=1 - 1e-7, precision_0=3.0, relax_b=1e-9)
    record: list = []
    with torch.no_grad():
        model(torch.randint(0, 31, (2, 10)), record=record)
    for layer in record:
        torch.testing.assert_close(layer["log_prior_precision"].exp(), torch.full((2, 4, 10), 3.0), rtol=1e-3, atol=0)


def probed(**switches):
    """(probe's values, parameters and record of every layer in numpy) of one model."""
    model, tokens, record = model_of(**switches), torch.randint(0, 31, (2, 10)), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model(tokens, record=record)
    numbers = [{k: v.double().numpy() for k, v in layer.items() if torch.is_tensor(v)} for layer in record]
    scalars = [{k: v.detach().double().numpy() for k, v in layer["params"].items()} for layer in record]
    return run_probe(model, tokens).values, scalars, numbers


def test_the_probe_shows_priors_posteriors_and_steps_as_g3_has_them():
    values, scalars, records = probed(uncertainty="carry")
    posterior = None
    for layer, (p, seen) in enumerate(zip(scalars, records, strict=True)):
        prior = (
            p["precision_0"][:, None] if layer == 0 else 1 / (p["relax_a"][:, None] / posterior + p["relax_b"][:, None])
        )
        prior = np.broadcast_to(prior, (2, 4, 10))
        share, gamma = p["prior_share"][:, None], p["context_power"][:, None]
        counted = np.exp(seen["log_evidence"]) * (np.arange(10) + 1) ** -gamma
        posterior = share * prior + (1 - share) * counted
        wanted = {
            "log_prior_precision": np.log(prior),
            "log_posterior_precision": np.log(posterior),
            "fusion_step": (1 - share) * counted / posterior,
        }
        for name, quantity in wanted.items():
            np.testing.assert_allclose(values[f"precision/{name}"][layer], quantity.mean((0, 2)), rtol=1e-4, atol=1e-5)


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


def turned_values(seen):
    """Values as their common frame has them: every mode turned by its angle times the position."""
    v, cos, sin = seen["v"], seen["rotary_cos"], seen["rotary_sin"]
    real, imaginary = np.split(v, 2, axis=-1)
    return np.concatenate((real * cos - imaginary * sin, real * sin + imaginary * cos), axis=-1)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_g11_a_tied_output_keeps_the_step_tangent_in_the_stream(kv_heads, norm_position):
    shape = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=kv_heads, head_dim=8, layer=0, n_layer=2)
    z = stream(2, LENGTH, WIDTH)
    switches = dict(norm_position=norm_position, norm_values=True, radial="none")
    tied, _ = run(z, shape=shape, tie_output=True, **switches)
    loose, _ = run(z, shape=shape, **switches)

    def tangency(out):
        return ((z * out).sum(-1) / (z.norm(dim=-1) * out.norm(dim=-1)).clamp_min(1e-9))[:, 1:].abs().max()

    assert tied.norm() > 1
    # In `pre` the magnitude is the stream's, and W_v z itself is not on the sphere; it is parallel to v all the same.
    assert tangency(tied) < 1e-7 and tangency(loose) > 0.05


def test_a_tied_output_of_grouped_heads_carries_the_mean_of_their_steps():
    """With W_o W_v = I, what every query head says alike reaches the stream as it is, not once per query head."""
    shape, z = replace(SHAPE, n_kv_head=2, head_dim=16), stream(1, LENGTH, WIDTH)
    switches = dict(tie_output=True, norm_position="post", nu_t=4.0, mu=0.0, kernel="gaussian")  # heads agree
    out, record = run(z, shape=shape, **switches)
    torch.manual_seed(3)
    weight = PolarAttention(shape, **switches).double().v.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(32, dtype=torch.float64), atol=1e-5, rtol=0)
    latent = record["update"].detach()[:, ::2].transpose(1, 2).flatten(-2)  # of one query head of either value head
    torch.testing.assert_close(out @ weight.T, latent, atol=1e-5, rtol=1e-5)


def test_tied_matrices_stay_orthonormal_through_training_and_share_their_gradient():
    model = model_of(tie_output=True, norm_position="post")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, 31, (2, 11))
    start = model.blocks[0].mixer.v.weight.detach().clone()
    for _ in range(3):
        model.loss(text[:, :-1], text[:, 1:]).backward()
        optimiser.step()
        optimiser.zero_grad()
    weight = model.blocks[0].mixer.v.weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert (weight - start).abs().max() > 1e-3
    tall = torch.nn.Linear(8, 16, bias=False)
    make_orthonormal(tall)
    torch.testing.assert_close(tall.weight.T @ tall.weight, torch.eye(8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("project_stream", ["none", "attention", "both"])
@pytest.mark.parametrize("block", [PolarAttention, StandardAttention, ExclusiveAttention])
def test_e11_a_projected_stream_grows_by_what_is_added_and_no_more(block, project_stream):
    record: list = []
    with torch.no_grad():
        model_of(block, project_stream=project_stream)(torch.randint(0, 31, (2, 10)), record=record)
    for layer in record:
        before, middle, after = (layer[f"residual_{name}"].double() for name in ("in", "mid", "out"))
        for branch, (a, b) in {"attention": (before, middle), "feed_forward": (middle, after)}.items():
            excess = (b.square().sum(-1) - a.square().sum(-1) - (b - a).square().sum(-1)).abs() / b.square().sum(-1)
            expected = project_stream == "both" or (project_stream == branch)
            assert (excess.max() < 1e-5) == expected


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_e7_the_complex_projector_removes_the_phase_too(projection):
    x, along = stream(1, LENGTH, WIDTH), {}
    for projector in ("real", "complex"):
        _, record = run(x, projection=projection, projector=projector, radial="none")
        v, update = (torch.complex(*record[name].chunk(2, dim=-1)) for name in ("v", "update"))
        along[projector] = (v.conj() * update).sum((1, 3))
    assert along["real"].real.abs().max() < 1e-9 and along["real"].imag.abs().max() > 0.1
    assert along["complex"].abs().max() < 1e-9


def test_student_mle_weighs_as_its_likelihood_does_and_its_iterations_converge():
    x = stream(1, LENGTH, WIDTH)
    _, record = run(x, kernel="student_mle", nu_t=2.0, transport="rotary", frequencies="shared")
    q, k = record["q"], record["k"]
    cos, sin = record["rotary_cos"], record["rotary_sin"]

    def turned(z):
        a, b = z.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    distance = (turned(q)[:, :, :, None] - turned(k)[:, :, None]).square().sum(-1) / 4
    expected = 1 / (1 + record["log_kappa_tilde"].exp() * distance / 2)
    torch.testing.assert_close(record["robust_weight"], expected.tril(), rtol=1e-6, atol=1e-9)
    # Every step is one of EM for the Student-t location, so they settle; the first still moves.
    outputs = [run(x, kernel="student_mle", nu_t=2.0, irls_steps=n)[0] for n in (1, 2, 60, 61)]
    assert (outputs[1] - outputs[0]).abs().max() > 1e-3
    assert (outputs[3] - outputs[2]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"consensus": "on"}, ["block.consensus", "none, gate, complex"]),
        ({"consensus": "gate", "projection": "none"}, ["block.consensus=gate", "block.projection="]),
        ({"consensus": "gate", "kernel": "exponential", "residual_form": "dot"}, ["block.residual_form=full"]),
        (
            {"consensus": "complex", "radial_correlation": "qk"},
            ["block.consensus=complex", "block.radial_correlation=vv"],
        ),
        ({"uncertainty": "keep"}, ["block.uncertainty", "none, carry"]),
        ({"uncertainty": "carry", "projection": "none"}, ["block.uncertainty=carry", "block.projection="]),
        (
            {"uncertainty": "carry", "prior_share": 0.0, "widen_q": 0.0},
            ["block.uncertainty=carry has no effect", "block.uncertainty=none"],
        ),
        ({"irls_steps": 1.5}, ["block.irls_steps", "whole number"]),
        ({"irls_steps": 2, "kernel": "gaussian"}, ["block.irls_steps=2", "block.kernel=gaussian"]),
        ({"prior_share": 1.0}, ["block.prior_share", "below 1"]),
        ({"relax_b": 0.0}, ["block.relax_b", "positive"]),
        ({"projector": "imaginary"}, ["block.projector", "real, complex"]),
        ({"project_stream": "all"}, ["block.project_stream", "none, attention, both"]),
        (
            {"transport": "phases", "kernel": "gaussian", "rotate_values": False},
            ["block.transport=phases", "block.rotate_values=true"],
        ),
    ],
)
def test_switches_that_exclude_each_other_say_what_to_set(switches, words):
    with pytest.raises(UserError) as error:
        PolarAttention(SHAPE, **switches)
    assert all(word in str(error.value) for word in words)


def test_off_is_understood_and_a_tie_behind_gains_warns():
    assert PolarAttention(SHAPE, consensus=False, uncertainty="off").consensus == "none"
    with pytest.warns(UserWarning, match="norm_position=post"):
        PolarAttention(SHAPE, tie_output=True)
    with pytest.warns(UserWarning, match="block.projection=per_head stays"):
        PolarAttention(SHAPE, tie_output=True, norm_position="post", head_gate=True, projection="global")


DECODED = [
    {"consensus": "complex", "irls_steps": 2},
    {"consensus": "gate", "radial": "shared", "mu_r": 0.1},
    {"uncertainty": "carry", "widen_k": 0.5, "irls_steps": 2},
    {"uncertainty": "carry", "consensus": "gate", "transport": "phases"},
    {"radial_flow": "equilibrium", "m_eq": 2.0, "mu": 0.3},
    {"kernel": "student_mle", "transport": "unitary", "retract": "exp"},
]


@pytest.mark.parametrize("switches", DECODED, ids=str)
def test_values_of_switches_that_no_yaml_has_decode_and_keep_to_their_documents(switches):
    model, text = model_of(**switches).eval(), torch.randint(0, 31, (2, 12))
    for name, parameter in model.named_parameters():
        if "transport.angles" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        whole, cache = model(text), model.new_cache(2, 12)
        pieces = [model(part, cache=cache) for part in text.split([5, 1, 1, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)
        ids = torch.tensor([4] * 5 + [9] * 7).expand(2, -1)
        alone = torch.cat([model(part) for part in text.split([5, 7], dim=1)], dim=1)
        torch.testing.assert_close(model(text, documents=ids), alone, atol=1e-4, rtol=1e-4)
