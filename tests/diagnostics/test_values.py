"""The probe's numbers against a float64 recomputation that shares no code with it."""

from functools import partial

import numpy as np
import pytest
import torch

from polarlm.attention import ExclusiveAttention, PolarAttention, RobustFilterAttention, StandardAttention
from polarlm.diagnostics import run_probe
from polarlm.model import GPT, GPTConfig
from tests.diagnostics import naive
from tests.diagnostics.naive import rms

BLOCKS = {
    "standard": (StandardAttention, None),
    "standard_rotated_grouped": (partial(StandardAttention, rotate_values=True), 2),
    "xsa": (ExclusiveAttention, None),
    "rfa": (RobustFilterAttention, 2),
    "polar": (partial(PolarAttention, projection="global", alpha=0.7), None),
}


def small_model(mixer, n_kv_head=None):
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=40, context=16, d_model=32, n_layer=2, n_head=4, n_kv_head=n_kv_head), mixer)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # fresh weights are so small that every quantity would be trivial
            torch.nn.init.normal_(parameter, std=0.25 if "embedding" not in name else 1.0)
    return model


@pytest.fixture(scope="module", params=BLOCKS)
def case(request):
    mixer, groups = BLOCKS[request.param]
    model = small_model(mixer, groups)
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    seen = naive.capture(model, tokens)
    return request.param, run_probe(model, tokens), seen, [naive.layer(model, i, s) for i, s in enumerate(seen)], model


def close(found, wanted, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(found, float), wanted, rtol=tolerance, atol=tolerance)


def head_mean(x):
    return x.mean((0, 1))  # (B, T, H) -> (H,)


def query_mean(x):
    return np.nanmean(np.nansum(x, -1), axis=(0, 2))  # sum over keys, mean over queries: (B, H, T, S) -> (H,)


def state_and_update(name, layer):
    """x = mV, the directional update and α v̄, each (B, T, D)."""
    batch, tokens = layer["v"].shape[:2]
    v, estimate = layer["v"].reshape(batch, tokens, -1), layer["estimate"].reshape(batch, tokens, -1)
    m = layer["m"] if layer["m"] is not None else rms(v)
    direction = v / rms(v)[..., None]
    update = estimate = estimate * (layer["p"]["alpha"] if name == "polar" else 1.0)
    if name == "xsa":
        along = (layer["v"] * layer["estimate"]).sum(-1) / (layer["v"] ** 2).sum(-1)
        update = (layer["estimate"] - along[..., None] * layer["v"]).reshape(batch, tokens, -1)
    if name == "polar":
        update = estimate - (direction * estimate).mean(-1, keepdims=True) * direction
    return m, direction, update, estimate


def test_residual_stream(case):
    _, probe, seen, _, _ = case
    depths = [rms(s["z"]) for s in seen] + [rms(seen[-1]["out"])]
    close(probe.values["radial/residual_rms"], [d.mean() for d in depths])
    close(probe.values["radial/residual_rms_std"], [d.std(ddof=1) for d in depths])
    close(probe.values["radial/residual_rms_p99"], [np.quantile(d, 0.99) for d in depths])
    close(probe.values["radial/residual_rms_first"], [d[:, 0].mean() for d in depths])
    attention = [(rms(s["mid"]) - rms(s["z"])).mean() for s in seen]
    ffn = [(rms(s["out"]) - rms(s["mid"])).mean() for s in seen]
    close(probe.values["radial/growth_attention"], attention)
    close(probe.values["radial/growth_ffn"], ffn)
    close(probe.values["radial/growth"], np.add(attention, ffn))


def test_stream_angles_and_tangency(case):
    _, probe, seen, _, _ = case

    def cos(a, b):
        return np.clip((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1), -1, 1)

    def tangency(z, step):  # a first token under projection stands still and has no direction of motion
        moved = np.linalg.norm(step, axis=-1) > 1e-6 * np.linalg.norm(z, axis=-1)
        return cos(z[moved], step[moved]).mean()

    close(probe.values["radial/angular_step_attention"], [np.arccos(cos(s["z"], s["mid"])).mean() for s in seen])
    close(probe.values["radial/angular_step_ffn"], [np.arccos(cos(s["mid"], s["out"])).mean() for s in seen])
    close(probe.values["radial/tangency_attention"], [tangency(s["z"], s["mid"] - s["z"]) for s in seen])
    close(probe.values["radial/tangency_ffn"], [tangency(s["mid"], s["out"] - s["mid"]) for s in seen])


def test_growth_of_the_latent_state(case):
    name, probe, seen, layers, model = case
    for i, layer in enumerate(layers):
        m, direction, update, estimate = state_and_update(name, layer)
        predicted = (direction * estimate).mean(-1)
        close(probe.values["radial/magnitude"][i], m.mean())
        close(probe.values["radial/growth_predicted"][i], predicted.mean())
        state = m[..., None] * direction
        close(probe.values["radial/growth_latent_unprojected"][i], (rms(state + estimate) - m).mean())
        if name == "polar":  # the radial channel moves the magnitude beside the directional step
            delta_m = _delta_m(layer, model.blocks[i].mixer)
            close(probe.values["radial/delta_m"][i], delta_m.mean())
            update = update + layer["p"]["beta"] * delta_m[..., None] * direction
        latent = rms(state + update) - m
        close(probe.values["radial/growth_latent"][i], latent.mean())
        if name in ("xsa", "polar"):
            assert abs(probe.values["radial/tangency_latent"][i]) < 1e-6
        angle = np.arccos(np.clip((state * (state + update)).mean(-1) / m / rms(state + update), -1, 1))
        close(probe.values["radial/angular_step_latent"][i], angle.mean())
        for label, measured in (("growth", rms(seen[i]["mid"]) - rms(seen[i]["z"])), ("growth_latent", latent)):
            slope = np.polyfit(predicted.ravel(), measured.ravel(), 1)[0]
            r2 = np.corrcoef(predicted.ravel(), measured.ravel())[0, 1] ** 2
            close(probe.values[f"radial/{label}_slope"][i], slope, 1e-3)
            close(probe.values[f"radial/{label}_r2"][i], r2, 1e-3)


def _delta_m(layer, mixer):
    """Appendix C's radial estimate, own weights."""
    p, m = layer["p"], layer["m"]
    out = np.zeros_like(m)
    for b in range(m.shape[0]):
        for i in range(m.shape[1]):
            terms = []
            for j in range(i + 1):
                mine, other = layer["v"][b, i], layer["v"][b, j]
                turned = np.stack([naive.turn(x, j - i, mixer.shape.rope_base) for x in other])
                moved = (mine * turned).mean() * m[b, j]
                d2 = (moved - m[b, i]) ** 2 / (p["eta_rk"] ** 2 + p["eta_rq"] ** 2 + p["sigma_r0"] ** 2)
                terms.append(((1 + d2 / p["nu_r"]) ** -(p["nu_r"] + 1), moved))
            w, moved = np.array(terms).T
            out[b, i] = (w * moved).sum() / w.sum() - m[b, i]
    return out


def test_attention(case):
    name, probe, _, layers, _ = case
    for i, layer in enumerate(layers):
        a, tokens = np.nan_to_num(layer["A"]), layer["A"].shape[-1]
        entropy = -np.where(a > 0, a * np.log(np.where(a > 0, a, 1)), 0).sum(-1)
        found = {key: value[i] for key, value in probe.values.items() if key.startswith("attention/")}
        close(found["attention/entropy"], entropy.mean((0, 2)))
        close(found["attention/effective_tokens"], np.exp(entropy).mean((0, 2)))
        close(found["attention/mass_first"], a[..., 0].mean((0, 2)))
        close(found["attention/mass_self"], np.diagonal(a, axis1=2, axis2=3).mean((0, 2)))
        lag = np.arange(tokens)[:, None] - np.arange(tokens)
        close(found["attention/mean_lag"], query_mean(a * lag))
        epsilon = np.nansum(layer["A"] * layer["distance"], -1)
        close(found["attention/consensus_epsilon"], epsilon.mean((0, 2)), 1e-3)  # √ near zero loses half the digits
        close(found["attention/consensus_broken"], (epsilon > 0.5).mean((0, 2)))
        v, estimate = layer["v"], layer["estimate"]
        sizes = np.linalg.norm(v, axis=-1) * np.linalg.norm(estimate, axis=-1)
        close(found["attention/self_similarity"], head_mean((v * estimate).sum(-1) / sizes))
        m, _, update, alpha_estimate = state_and_update(name, layer)
        largest = [[m[b, : t + 1].argmax() for t in range(tokens)] for b in range(a.shape[0])]
        mass = [[a[b, :, t, largest[b][t]] for t in range(tokens)] for b in range(a.shape[0])]
        close(found["attention/mass_largest"], np.mean(mass, axis=(0, 1)))
        removed = ((alpha_estimate - update) ** 2).reshape(v.shape).sum((0, 1, 3))
        if name in ("xsa", "polar"):
            close(found["attention/removed_share"], removed / (alpha_estimate**2).reshape(v.shape).sum((0, 1, 3)))
        else:
            assert "attention/removed_share" not in found


def test_resultant_length_and_spectral_mass(case):
    _, probe, _, layers, _ = case
    for i, layer in enumerate(layers):
        size = np.linalg.norm(layer["v"], axis=-1)  # (B, T, H)
        attended = np.einsum("bhij,bjh->bih", np.nan_to_num(layer["A"]), size)
        length = np.linalg.norm(layer["estimate"], axis=-1) / attended
        close(probe.values["radial/resultant_length"][i], head_mean(length))
        assert length.max() <= 1 + 1e-9
        close(probe.values["radial/spectral_mass"][i], head_mean(size**2 / (size**2).sum(-1, keepdims=True)))


def test_evidence_and_precision(case):
    name, probe, _, layers, _ = case
    for i, layer in enumerate(layers):
        close(probe.values["precision/log_evidence"][i], head_mean(layer["evidence"]))
        close(probe.values["precision/log_evidence_spread"][i], layer["evidence"].std(-1, ddof=1).mean())
        position = np.log(np.arange(1, layer["evidence"].shape[1] + 1))
        x = np.broadcast_to(position, layer["evidence"].shape[:2]).ravel()
        slopes = [np.polyfit(x, layer["evidence"][..., h].ravel(), 1)[0] for h in range(layer["evidence"].shape[2])]
        close(probe.values["precision/log_evidence_slope"][i], slopes, 1e-3)
        filters = name in ("rfa", "polar")
        assert ("precision/robust_weight" in probe.values) == filters
        assert ("precision/log_kappa" in probe.profiles) == filters
        if not filters:
            continue
        close(probe.values["precision/robust_weight"][i], np.nanmean(layer["w"], axis=(0, 2, 3)))
        nu = layer["p"]["nu_t" if name == "polar" else "nu"]
        outlier = np.where(np.isnan(layer["w"]), np.nan, layer["w"] < 2 ** -(nu + 1)[:, None, None])
        close(probe.values["precision/outlier_share"][i], np.nanmean(outlier, axis=(0, 2, 3)))


def test_profiles_against_lag(case):
    name, probe, _, layers, _ = case
    wanted = {"attention/weight": "A"}
    if name in ("rfa", "polar"):
        wanted |= {"precision/log_kappa": "log_kappa", "precision/log_kappa_tilde": "log_kappa_tilde"}
    assert set(probe.profiles) == set(wanted)
    for profile, key in wanted.items():
        lags = probe.profiles[profile]["x"]
        assert lags == [0, 1, 2, 3, 4, 6, 8]
        for i, layer in enumerate(layers):
            by_lag = [np.diagonal(layer[key], -lag, 2, 3).mean((0, 2)) for lag in lags]
            close(probe.profiles[profile]["y"][i], np.stack(by_lag, axis=-1))


def test_parameters_are_the_estimators(case):
    name, probe, _, layers, _ = case
    found = {key for key in probe.values if key.startswith("parameters/")}
    if name not in ("rfa", "polar"):
        assert not found
        return
    assert {"parameters/nu_t", "parameters/eta_tk", "parameters/sigma_t0", "parameters/mu"} <= found
    for i, layer in enumerate(layers):
        close(probe.values["parameters/mu"][i], layer["p"]["mu"])
        close(probe.values["parameters/eta_tq"][i], layer["p"]["eta_tq" if name == "polar" else "eta_q"])
