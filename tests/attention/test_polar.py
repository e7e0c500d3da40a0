"""Polar's own promises: units, initial values, tangency, radial channel, switches, bad input."""

import dataclasses
import math

import pytest
import torch

from polarlm.attention import (
    MixerShape,
    PolarAttention,
    PolarLiteralAttention,
    RobustFilterAttention,
    StandardAttention,
    TokenContext,
)
from polarlm.attention.estimator import decay_rates
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig

LENGTH, WIDTH = 9, 32
SHAPE = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=4, head_dim=8, layer=0, n_layer=2)


def run(mixer, x=None):
    record: dict = {}
    x = torch.randn(2, LENGTH, WIDTH) if x is None else x
    tables = rotary_tables(torch.arange(x.shape[1]), mixer.rotary_dim, dtype=x.dtype)
    return mixer(x, TokenContext(tables, record=record)), record


def test_magnitude_times_direction_is_the_projected_stream():  # G12
    mixer, x = PolarAttention(SHAPE), torch.randn(2, LENGTH, WIDTH)
    _, record = run(mixer, x)
    v = record["v"].transpose(1, 2).flatten(-2)
    torch.testing.assert_close(v.norm(dim=-1), torch.full((2, LENGTH), WIDTH**0.5))
    torch.testing.assert_close(record["magnitude"][..., None] * v, mixer.v(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_first_token_has_nowhere_to_turn(projection):  # G12
    _, record = run(PolarAttention(SHAPE, projection=projection))
    assert record["update"][:, :, 0].abs().max() < 1e-5
    assert record["update"][:, :, 1:].abs().max() > 0.1


@pytest.mark.parametrize("projection", ["per_head", "global", "evidence"])
def test_update_is_tangent_in_latent_coordinates(projection):
    _, record = run(PolarAttention(SHAPE, projection=projection, nu_t=[1.0, 2.0, 4.0, 8.0]))
    assert (record["v"] * record["update"]).sum(dim=(1, 3)).abs().max() < 1e-4


def test_update_is_tangent_in_the_stream_only_when_the_output_inverts_the_input():  # G11
    mixer = PolarAttention(SHAPE, norm_position="post", radial="none", projection="global")
    z = torch.randn(2, LENGTH, WIDTH)
    out, _ = run(mixer, z)
    assert ((z * out).sum(-1) / (z.norm(dim=-1) * out.norm(dim=-1) + 1e-9)).abs().max() > 0.05  # generic W_v, W_o
    with torch.no_grad():
        mixer.v.weight.copy_(torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q)
        mixer.out.weight.copy_(mixer.v.weight.T)
    out, _ = run(mixer, z)
    assert out.norm() > 1
    assert (z * out).sum(-1).abs().max() < 1e-4


@pytest.mark.parametrize("kernel", ["student", "exponential"])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("nu", [1.0, 4.0, 100.0])
def test_fresh_logit_range_is_that_of_qk_normed_attention(kernel, head_dim, nu):
    shape = MixerShape(d_model=64, n_head=2, n_kv_head=2, head_dim=head_dim, layer=0, n_layer=2)
    mixer = PolarAttention(shape, kernel=kernel, nu_t=nu, tau=0.5, mu=0.0)
    p = mixer.estimator.read()
    noise = p["eta_tk"] ** 2 + p["eta_tq"] ** 2 + p["sigma_t0"] ** 2
    x = (1 + p["m_inf"] ** 2) / noise * 2  # kappa_tilde |R|^2 / d_h at m = 1, cos = 0
    depth = (p["nu_t"] + 1) * torch.log1p(x / p["nu_t"]) if kernel == "student" else x / p["tau"]
    torch.testing.assert_close(depth, torch.full((2,), math.sqrt(head_dim)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mixer", "shares"),
    [
        (PolarAttention, {"eta_tk": 0.4, "eta_tq": 0.4, "sigma_t0": 0.2}),
        (RobustFilterAttention, {"eta_k": 0.45, "eta_q": 0.45, "sigma_0": 0.1}),
    ],
)
def test_matched_noise_is_mostly_measurement_and_little_floor(mixer, shares):
    # A floor above the key noise would turn the prior of decay from recency to its opposite.
    variances = {name: value.square() for name, value in mixer(SHAPE).estimator.read().items() if name in shares}
    total = sum(variances.values())
    for name, share in shares.items():
        torch.testing.assert_close(variances[name] / total, torch.full((4,), share))


@pytest.mark.parametrize("norm_position", ["post", "pre", "both"])
@pytest.mark.parametrize("size", [dict(d_model=64, n_layer=2, n_head=4), dict(d_model=192, n_layer=6, n_head=6)])
def test_fresh_magnitudes_are_near_one(norm_position, size):
    config = GPTConfig(vocab_size=65, context=64, ffn="gelu", **size)
    model = GPT(config, lambda shape: PolarAttention(shape, norm_position=norm_position))
    record: list = []
    with torch.no_grad():
        model(torch.randint(0, 65, (4, 64)), record=record)
    for layer in record:
        assert 0.5 < layer["magnitude"].mean() < 2.0


def test_lift_doubles_the_latent_space():
    mixer = PolarAttention(SHAPE, lift=2)
    out, record = run(mixer)
    assert out.shape == (2, LENGTH, WIDTH)
    assert record["v"].shape == (2, 4, LENGTH, 16)


@pytest.mark.parametrize("lift", [1, 2])
@pytest.mark.parametrize("scope", ["global", "per_head"])
def test_queries_and_keys_are_normalised_apart(scope, lift):
    """Every head's, or the whole, q and k at |.|^2 = r^2 modes; a norm over both at once would mix their scales."""
    mixer = PolarAttention(SHAPE, norm_scope=scope, lift=lift, radius=1.5)
    with torch.no_grad():
        mixer.qk.weight[: mixer.qk.out_features // 2] *= 5.0  # queries only
    x = torch.randn(2, LENGTH, WIDTH)
    _, record = run(mixer, x)
    parts = (x @ mixer.qk.weight.T).detach().chunk(2, dim=-1)
    for name, part in zip("qk", parts):
        heads = part.unflatten(-1, (4, -1)).transpose(1, 2)
        norm = part.norm(dim=-1)[:, None, :, None] if scope == "global" else heads.norm(dim=-1, keepdim=True)
        modes = part.shape[-1] / 2 if scope == "global" else heads.shape[-1] / 2
        torch.testing.assert_close(record[name], heads / norm * 1.5 * modes**0.5, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm_position", ["post", "pre", "both"])
@pytest.mark.parametrize("radial", ["own", "shared"])
@pytest.mark.parametrize("correlation", ["vv", "one"])
def test_equal_magnitudes_and_directions_ask_for_no_radial_change(norm_position, radial, correlation):  # R1 as a block
    x = 3 * torch.randn(1, 1, WIDTH).expand(2, LENGTH, WIDTH)
    switches = {"radial": radial, "radial_correlation": correlation, "norm_position": norm_position}
    _, record = run(PolarAttention(SHAPE, rotate_values=False, **switches), x)
    assert record["delta_m"].abs().max() < 1e-5 * record["magnitude"].max()


@pytest.mark.parametrize("norm_position", ["post", "pre", "both"])
@pytest.mark.parametrize("norm_values", [True, False])
def test_values_lie_on_the_sphere_exactly_when_asked(norm_position, norm_values):
    mixer = PolarAttention(SHAPE, radial="none", norm_position=norm_position, norm_values=norm_values)
    _, record = run(mixer)
    radius = record["v"].transpose(1, 2).flatten(-2).norm(dim=-1)
    assert torch.allclose(radius, torch.full_like(radius, WIDTH**0.5), rtol=1e-5) == norm_values


def test_unit_magnitude_keeps_the_prior_over_lags():
    """m = 1 for every token is transported like any other magnitude; near tokens still count more."""
    mixer = PolarAttention(SHAPE, magnitude="unit", radial="none", mu=0.1, forgetting="none")
    x = torch.randn(1, 128, WIDTH)
    _, record = run(mixer, x)
    fastest = record["log_kappa"][0, -1, -1].flip(0)  # by lag, of the head with the largest decay
    assert (fastest.diff() <= 1e-6).all() and fastest[0] - fastest[-1] > 1
    p = {name: value.double() for name, value in record["params"].items()}
    e2 = torch.exp(-2 * p["mu"][-1] * torch.arange(128).double())
    expected = (e2 + p["m_inf"] ** 2) / (p["eta_tk"][-1] ** 2 * e2 + p["sigma_t0"][-1] ** 2)
    torch.testing.assert_close(fastest.double(), expected.log(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("retract", ["norm", "exp", "geodesic"])
def test_a_retraction_keeps_the_length_of_the_state(retract):  # E10: the plain step grows it to second order
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    grown = {}
    for kind in ("none", retract):
        torch.manual_seed(4)
        mixer = PolarAttention(SHAPE, projection="global", radial="none", retract=kind, alpha=0.5).double()
        _, record = run(mixer, x)
        state = record["magnitude"][..., None] * record["v"].transpose(1, 2).flatten(-2)
        moved = state + record["update"].transpose(1, 2).flatten(-2)
        grown[kind] = (moved.norm(dim=-1) / state.norm(dim=-1) - 1).abs().max()
    assert grown[retract] < 1e-12 and grown["none"] > 1e-3


def test_the_step_is_alpha_or_alpha_times_m():
    x, updates = torch.randn(2, LENGTH, WIDTH), []
    for over in (True, False):
        torch.manual_seed(4)
        _, record = run(PolarAttention(SHAPE, alpha_over_m=over), x)
        updates.append(record["update"])
    torch.testing.assert_close(updates[1], record["magnitude"][:, None, :, None] * updates[0])


def test_learned_and_split_frequencies():
    grouped = MixerShape(d_model=WIDTH, n_head=4, n_kv_head=2, head_dim=8, layer=0, n_layer=2)
    for mixer_class in (PolarAttention, StandardAttention, RobustFilterAttention):
        learned = mixer_class(grouped, frequencies="learned").frequencies
        assert learned.optim_group == "estimator" and isinstance(learned.log_frequency, torch.nn.Parameter)
        torch.testing.assert_close(learned.log_frequency.exp()[1], 10000.0 ** (-torch.arange(4) / 4))
        bank = mixer_class(grouped, frequencies="per_head").frequencies.log_frequency.exp()
        assert bank.shape == (2, 4) and bank[0].max() < bank[1].min()  # slow heads, then fast ones
        torch.testing.assert_close(bank.flatten().sort(descending=True).values, 10000.0 ** (-torch.arange(8) / 8))


def test_beta_zero_switches_the_radial_step_off():
    outputs = []
    for switches in ({"radial": "own", "beta": 0.0}, {"radial": "none"}):
        torch.manual_seed(2)
        outputs.append(run(PolarAttention(SHAPE, **switches), torch.ones(1, LENGTH, WIDTH).cumsum(1).sin())[0])
    torch.testing.assert_close(*outputs)


def test_parameters_are_learned_or_frozen_one_by_one():
    mixer = PolarAttention(SHAPE, radial="own", frozen=["alpha", "mu", "nu_t"])
    learned = {name.split(".")[1] for name, _ in mixer.named_parameters() if name.startswith("estimator")}
    assert learned.isdisjoint({"alpha", "mu", "nu_t"})
    assert {"eta_tq", "eta_tk", "sigma_t0", "m_inf", "beta", "nu_r", "eta_rq", "eta_rk", "sigma_r0"} <= learned


def test_decay_rates_are_spread_over_the_heads():
    rates = decay_rates("mu", 0.2, spread=True, heads=8)
    torch.testing.assert_close(rates, torch.tensor([0, 0, *(0.2 * 10 ** -(2 - 0.4 * i) for i in range(6))]).double())
    torch.testing.assert_close(decay_rates("mu", 0.2, spread=False, heads=8), torch.full((8,), 0.2).double())
    shape = dataclasses.replace(SHAPE, n_head=8, n_kv_head=8, head_dim=4)
    of_block = PolarAttention(shape, mu=0.2).estimator.read()["mu"]
    torch.testing.assert_close(of_block.double(), rates)


def test_heads_without_decay_stay_without_decay():
    mixer = PolarAttention(SHAPE, mu=0.1)
    rates = mixer.estimator.read()["mu"]
    assert rates[0] == 0 and (rates[1:] > 0).all() and torch.isclose(rates[-1], torch.tensor(0.1))
    optimiser = torch.optim.Adam(mixer.parameters(), lr=0.1)
    run(mixer)[0].square().sum().backward()
    optimiser.step()
    moved = mixer.estimator.read()["mu"]
    assert moved[0] == 0 and (moved[1:] != rates[1:]).all()


def test_values_are_kept_out_of_weight_decay():
    assert PolarAttention(SHAPE).v.optim_group == "no_decay"


def test_literal_magnitude_and_projection_are_as_printed():  # E2, E4, E6
    mixer = PolarLiteralAttention(SHAPE)
    x = torch.randn(2, LENGTH, WIDTH)
    _, record = run(mixer, x)
    v_raw = mixer.qkv(x).chunk(3, dim=-1)[2]
    torch.testing.assert_close(record["magnitude"], v_raw.norm(dim=-1))
    torch.testing.assert_close(record["v"].norm(dim=-1), torch.full((2, 1, LENGTH), WIDTH**0.5))
    # For the first token v_bar = v, so the printed projector gives v - v (v^H v) = (1 - r^2) v instead of 0.
    torch.testing.assert_close(record["update"][:, :, 0], (1 - WIDTH) * record["v"][:, :, 0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"kernel": "cauchy"}, ["block.kernel", "cauchy", "student"]),
        ({"projection": "both"}, ["block.projection", "evidence"]),
        ({"radial": "on"}, ["block.radial", "shared"]),
        ({"norm_position": "middle"}, ["block.norm_position", "post"]),
        ({"magnitude": "maybe"}, ["block.magnitude", "own, unit"]),
        ({"lift": 3}, ["block.lift", "3"]),
        ({"eta_tk": -1.0}, ["block.eta_tk", "-1.0", "at least 0"]),
        ({"eta_tk": "much"}, ["block.eta_tk", "much", "number"]),
        ({"eta_tk": 0.0, "sigma_t0": 0.0}, ["block.precision.eta_tk", "block.precision.sigma_t0", "infinite"]),
        ({"nu_t": 0.0}, ["block.nu_t", "positive"]),
        ({"kernel": "exponential", "tau": 0.0}, ["block.tau", "positive"]),
        ({"m_inf": float("nan")}, ["block.m_inf", "finite"]),
        ({"nu_t": [1.0, 2.0]}, ["block.nu_t", "2 values", "4"]),
        ({"beta": [1.0, 2.0]}, ["block.beta", "one number"]),
        ({"frozen": ["nuu"]}, ["block.frozen", "nuu", "nu_t"]),
        ({"radial": "own", "magnitude": "unit"}, ["block/radial=own", "block/precision"]),
        (
            {"residual_form": "dot"},
            ["block.influence.residual_form=dot", "block/influence=student", "block/influence=exponential"],
        ),
        ({"residual_form": "angle"}, ["block.residual_form", "angle", "full"]),
        ({"radial_correlation": "kk"}, ["block.radial_correlation", "kk", "vv, qk, one"]),
        ({"frequencies": "own"}, ["block.frequencies", "own", "shared, per_head, learned"]),
        ({"norm_gain": "head"}, ["block.norm_gain", "head", "channel"]),
        ({"retract": "sphere"}, ["block.retract", "sphere", "norm, exp"]),
        ({"retract": "exp", "projection": "none"}, ["block/step=retracted", "block.step.projection=none"]),
        ({"retract": "geodesic"}, ["block/step=geodesic", "block.step.projection=global"]),
        ({"retract": "norm", "radial": "none", "norm_values": False}, ["block/step=retracted", "block/inputs=sphere"]),
        ({"irls_steps": 0}, ["block.influence.irls_steps", "0", "at least 1"]),
        ({"irls_steps": 2, "kernel": "gaussian"}, ["block.influence.irls_steps=2", "block/influence=gaussian"]),
        ({"evidence_clamp": -1.0}, ["block.evidence_clamp", "-1.0", "at least 0"]),
    ],
)
def test_bad_switches_say_what_is_allowed(switches, words):
    with pytest.raises(UserError) as error:
        PolarAttention(SHAPE, **switches)
    assert all(word in str(error.value) for word in words)


def bounded(**noise):
    return PolarAttention(SHAPE, **noise).parts.precision.bounded


def test_a_backend_that_cannot_hold_growing_precision_refuses_it():
    x = torch.randn(1, 5, WIDTH)
    context = TokenContext(rotary_tables(torch.arange(5), 8))
    for floorless in (
        PolarAttention(SHAPE, sigma_t0=0.0, backend="triton"),
        RobustFilterAttention(SHAPE, sigma_0=0.0, sigma_process=0.0, backend="triton"),
    ):
        with pytest.raises(UserError, match="noise floor"):
            floorless(x, context)
    assert bounded() and bounded(sigma_t0=0.0, m_inf=0.0)
    assert bounded(sigma_t0=0.0, mu=0.0)


@pytest.mark.parametrize("extreme", [{"nu_t": 1e-3}, {"nu_t": 1e8}, {"mu": 5.0, "mu_spread": False}, {"m_inf": 0.0}])
def test_extreme_parameters_stay_finite(extreme):  # M3
    mixer = PolarAttention(SHAPE, **extreme)
    out, _ = run(mixer)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "switches",
    [
        {"norm_position": "post"},
        {"norm_position": "pre"},
        {"norm_scope": "global"},
        {"lift": 2},
        {"kernel": "gaussian"},
        {"kernel": "exponential", "projection": "global"},
        {"kernel": "exponential", "residual_form": "dot", "norm_position": "pre"},
        {"radial": "shared", "rotate_values": False},
        {"radial": "none", "norm_values": False, "projection": "none"},
        {"radial": "none", "magnitude": "unit"},
        {"radial_correlation": "qk", "frequencies": "learned"},
        {"radial": "shared", "radial_correlation": "one", "frequencies": "per_head"},
        {"retract": "exp", "alpha_over_m": False},
        {"retract": "geodesic", "projection": "global", "norm_gain": "channel"},
        {"irls_steps": 3},
    ],
    ids=lambda switches: "-".join(f"{key}={value}" for key, value in switches.items()),
)
def test_every_switch_decodes_causally_and_leaves_no_parameter_idle(switches, kv_heads):
    config = GPTConfig(vocab_size=31, context=16, d_model=WIDTH, n_layer=2, n_head=4, n_kv_head=kv_heads)
    model = GPT(config, lambda shape: PolarAttention(shape, **switches))
    text = torch.randint(0, 31, (2, 10))
    model.loss(text[:, :-1], text[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        full, cache = model(text), model.new_cache(2, 10)
        stepwise = torch.cat([model(token, cache=cache) for token in text.split(1, dim=1)], dim=1)
    torch.testing.assert_close(stepwise, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("radial", "off", "none"),  # a word on the command line
        ("radial", False, "none"),  # the same word in a yaml
        ("magnitude", "on", "own"),
        ("magnitude", True, "own"),
        ("magnitude", "off", "unit"),
        ("magnitude", False, "unit"),
    ],
)
def test_on_and_off_are_still_understood(key, typed, meant):
    base = {"radial": "none"}
    typed_mixer, meant_mixer = (PolarAttention(SHAPE, **base | {key: value}) for value in (typed, meant))
    assert typed_mixer.parts.settings() == meant_mixer.parts.settings()


def test_the_record_shows_the_capped_precision_that_the_logits_use():
    mixer = PolarAttention(SHAPE, eta_tq=1e-3, eta_tk=1e-3, sigma_t0=1e-3)  # kappa_tilde would be e^12.7
    _, record = run(mixer)
    assert record["log_kappa"].max() > 12
    torch.testing.assert_close(record["log_kappa_tilde"].max(), torch.tensor(math.log(1e4)))
