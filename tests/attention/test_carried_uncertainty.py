"""Appendix G.3 through the block: precision from layer to layer, and limits that it must have."""

import numpy as np
import torch

from polarlm.attention import MixerShape
from polarlm.geometry.precision import carry_to_next_layer, fused_update
from tests.attention.appendix_g import LENGTH, WIDTH, model_of, probed, run, stream

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


def test_precision_passes_through_the_layers_unchanged_where_nothing_changes_it():
    model = model_of(uncertainty="carry", prior_share=1 - 1e-7, precision_0=3.0, relax_b=1e-9)
    record: list = []
    with torch.no_grad():
        model(torch.randint(0, 31, (2, 10)), record=record)
    for layer in record:
        torch.testing.assert_close(layer["log_prior_precision"].exp(), torch.full((2, 4, 10), 3.0), rtol=1e-3, atol=0)


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
