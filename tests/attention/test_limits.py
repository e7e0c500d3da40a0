"""The blocks are one family: with the right switches they turn into each other, outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polarlm.attention import (
    ExclusiveAttention,
    MixerShape,
    PolarAttention,
    RobustFilterAttention,
    StandardAttention,
    TokenContext,
)
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.geometry.transport import rotary_frequencies, transport_pairwise

HEADS, SIZE, WIDTH, LENGTH = 4, 8, 32, 11


def shape(heads: int = HEADS, groups: int | None = None) -> MixerShape:
    return MixerShape(
        d_model=WIDTH, n_head=heads, n_kv_head=groups or heads, head_dim=WIDTH // heads, layer=0, n_layer=2
    )


def rotary(mixer) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_tables(torch.arange(LENGTH), mixer.rotary_dim)


def constant_precision(**switches) -> PolarAttention:
    """Polar with constant kappa, the exponential kernel, un-normalised values, and no radial channel (beta = 0)."""
    switches = {"rotate_values": False, "projection": "none", "forgetting": "none"} | switches
    groups = switches.pop("groups", None)
    return PolarAttention(
        shape(groups=groups),
        kernel="exponential",
        magnitude="unit",
        mu=0.0,
        radial="none",
        norm_values=False,
        **switches,
    )


def copy_weights(standard: StandardAttention, polar: PolarAttention) -> None:
    with torch.no_grad():
        split = polar.qk.weight.shape[0]
        polar.qk.weight.copy_(standard.qkv.weight[:split])
        polar.v.weight.copy_(standard.qkv.weight[split:])
        polar.out.weight.copy_(standard.out.weight)


def assert_same_function(standard: StandardAttention, polar: PolarAttention) -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    prepare = nn.Identity() if polar.pre_norm else nn.RMSNorm(WIDTH, eps=0.0)  # `pre` normalises the stream itself
    weight = torch.randn(2, LENGTH, WIDTH)
    results = []
    for mixer in (standard, polar):
        x_ = x.clone().requires_grad_()
        out = mixer(prepare(x_), TokenContext(rotary(mixer)))
        (out * weight).sum().backward()
        qkv = mixer.qkv.weight.grad if mixer is standard else torch.cat((mixer.qk.weight.grad, mixer.v.weight.grad))
        results.append((out, x_.grad, qkv, mixer.out.weight.grad))
    assert results[0][0].std() > 0.05
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("rotate_values", [False, True])
def test_polar_with_constant_precision_is_standard_attention_with_qk_norm(rotate_values, groups):  # K2, M2
    standard = StandardAttention(shape(groups=groups), qk_norm=True, rotate_values=rotate_values)
    polar = constant_precision(rotate_values=rotate_values, groups=groups)
    copy_weights(standard, polar)
    assert_same_function(standard, polar)


def test_qk_norms_gain_starts_where_it_is_told_and_multiplies_fresh_logits_by_its_square():
    plain, gained = (StandardAttention(shape(), qk_norm=True, qk_gain=gain) for gain in (1.0, 1.5))
    gained.load_state_dict({**plain.state_dict(), **{k: v for k, v in gained.state_dict().items() if "norm" in k}})
    x, records = torch.randn(1, LENGTH, WIDTH), [{}, {}]
    for mixer, record in zip((plain, gained), records, strict=True):
        mixer(x, TokenContext(rotary(mixer), record=record))
    logits = [r["weights"].clamp_min(1e-30).log() + r["log_evidence"].unsqueeze(-1) for r in records]
    seen = records[0]["weights"] > 0
    torch.testing.assert_close(logits[1][seen], 1.5**2 * logits[0][seen], atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r"block\.qk_gain=2 .* block\.qk_norm=true"):
        StandardAttention(shape(), qk_gain=2.0)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("rotate_values", [False, True])
def test_the_same_with_per_head_projection_is_xsa(rotate_values, groups):
    exclusive = ExclusiveAttention(shape(groups=groups), qk_norm=True, rotate_values=rotate_values)
    polar = constant_precision(rotate_values=rotate_values, projection="per_head", groups=groups)
    copy_weights(exclusive, polar)
    assert_same_function(exclusive, polar)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_polar_with_dot_form_and_raw_queries_is_standard_attention(backend, groups):  # K11, M1 without QK-norm
    standard = StandardAttention(shape(groups=groups))
    polar = raw_dot(groups=groups, backend=backend)
    copy_weights(standard, polar)
    assert_same_function(standard, polar)


def raw_dot(tau: float = 0.7, **switches) -> PolarAttention:
    """Constant precision, raw q and k, residual -2 q.k, and K2's temperature tau = 2 kappa_tilde sqrt(Dh)/d_h."""
    share = (4 / (tau * SIZE**0.5) / 3) ** 0.5  # three equal noises make up 1/kappa_tilde
    switches = {"norm_position": "pre", "residual_form": "dot", "tau": tau, "m_inf": 0.0} | switches
    return constant_precision(eta_tk=share, eta_tq=share, sigma_t0=share, **switches)


@pytest.mark.parametrize("change", [{"residual_form": "full"}, {"norm_position": "both"}, {"radius": 2.0}])
def test_without_dot_form_or_raw_queries_it_is_not(change):
    standard, polar = StandardAttention(shape()), raw_dot(**change)
    copy_weights(standard, polar)
    with pytest.raises(AssertionError):
        assert_same_function(standard, polar)


def test_a_wrong_temperature_is_not_standard_attention():
    standard, polar = StandardAttention(shape(), qk_norm=True), constant_precision(eta_tk=1.0)
    copy_weights(standard, polar)
    with pytest.raises(AssertionError):
        assert_same_function(standard, polar)


def test_xsa_is_attention_and_the_published_two_lines():  # M1
    mixer = ExclusiveAttention(shape())
    record: dict = {}
    mixer(torch.randn(2, LENGTH, WIDTH), TokenContext(rotary(mixer), record=record))
    y, v = record["v_bar"], record["v"]
    unit = F.normalize(v, dim=-1)
    torch.testing.assert_close(record["update"], y - (y * unit).sum(-1, keepdim=True) * unit)


def test_xsa_in_some_layers_is_xsa_there_and_standard_elsewhere():
    plain, everywhere = StandardAttention(shape()), ExclusiveAttention(shape())
    x, context = torch.randn(2, LENGTH, WIDTH), TokenContext(rotary(plain))
    everywhere.load_state_dict(plain.state_dict())
    for layers, expected in (([1], plain), ([0], everywhere), ([0, 1], everywhere)):  # this is layer 0
        exclusive = ExclusiveAttention(shape(), layers=layers)
        exclusive.load_state_dict(plain.state_dict())
        torch.testing.assert_close(exclusive(x, context), expected(x, context))
    assert not torch.allclose(plain(x, context), everywhere(x, context), atol=0.01)


def test_value_rotation_is_pairwise_transport():  # M1 for standard_rove
    mixer = StandardAttention(shape(), rotate_values=True)
    record: dict = {}
    mixer(torch.randn(2, LENGTH, WIDTH), TokenContext(rotary(mixer), record=record))
    frequencies = -rotary_frequencies(SIZE)  # RoPE's sign of w against the paper's: a gauge, but the same for both
    for head in range(HEADS):
        carried = transport_pairwise(record["v"][1, head], torch.arange(LENGTH).float(), frequencies)
        expected = (record["weights"][1, head].unsqueeze(-1) * carried).sum(-2)
        torch.testing.assert_close(record["v_bar"][1, head], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["student", "exponential", "gaussian"])
def test_rfa_without_decay_has_polars_directional_weights(kernel):  # K12
    noise = {"nu": 3.0} if kernel == "student" else {"tau": 0.7} if kernel == "exponential" else {}
    rfa = RobustFilterAttention(shape(), kernel=kernel, mu=0.0, eta_q=0.5, eta_k=0.4, sigma_0=0.3, **noise)
    polar_noise = {"nu_t": 3.0} if "nu" in noise else dict(noise)
    polar = PolarAttention(
        shape(),
        kernel=kernel,
        mu=0.0,
        eta_tq=0.5,
        eta_tk=0.4,
        sigma_t0=0.3,
        m_inf=0.0,
        radial="none",
        magnitude="unit",
        forgetting="none",
        **polar_noise,
    )
    with torch.no_grad():
        if kernel != "gaussian":
            polar.qk.weight.copy_(rfa.qkv.weight[: 2 * WIDTH])
    x = torch.randn(2, LENGTH, WIDTH)
    records: list[dict] = [{}, {}]
    for mixer, record in zip((rfa, polar), records):
        mixer(x, TokenContext(rotary(mixer), record=record))
    torch.testing.assert_close(records[0]["weights"], records[1]["weights"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(records[0]["log_evidence"], records[1]["log_evidence"], atol=1e-4, rtol=1e-4)


def test_rfa_follows_appendix_a_literally():  # K12: an independent transcription, decay and process noise included
    mixer = RobustFilterAttention(shape(), mu=[0.0, 0.05, 0.2, 1.0], nu=[2.0, 3.0, 4.0, 50.0])
    record: dict = {}
    mixer(torch.randn(2, LENGTH, WIDTH), TokenContext(rotary(mixer), record=record))
    p = {name: value[:, None, None].double() for name, value in record["params"].items()}
    q, k, v = (torch.complex(*record[name].double().chunk(2, dim=-1)) for name in "qkv")
    time = torch.arange(LENGTH).double()
    lag = time[:, None] - time
    frequencies = 10000.0 ** -(torch.arange(SIZE // 2).double() / (SIZE // 2))
    # e^{A lag} k_j = e^{-mu lag} e^{-i w lag} k_j, in the code's sign of w
    phase = torch.exp(-1j * lag[..., None] * frequencies)
    decay = torch.exp(-p["mu"] * lag.abs())
    residual = q[..., :, None, :] - decay[..., None] * phase * k[..., None, :, :]
    gathered = torch.where(p["mu"] > 0, (1 - decay**2) / (2 * p["mu"].clamp_min(1e-9)), lag.abs())
    variance = p["sigma_process"] ** 2 * gathered + p["eta_k"] ** 2 * decay**2 + p["sigma_0"] ** 2
    distance = residual.abs().square().sum(-1) / (variance + p["eta_q"] ** 2) / (SIZE // 2)
    logits = -variance.log() - (p["nu"] + 1) * torch.log(1 + distance / p["nu"])
    weights = logits.masked_fill(lag < 0, float("-inf")).softmax(-1) * decay  # A ⊙ E
    v_bar = (weights[..., None] * phase * v[..., None, :, :]).sum(-2)
    torch.testing.assert_close(record["weights"].double(), weights, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(record["v_bar"].double(), torch.cat((v_bar.real, v_bar.imag), -1), atol=1e-6, rtol=1e-4)


def test_rfas_process_noise_tends_to_free_diffusion_as_decay_vanishes():
    # One head each: fast, slow, hardly, not at all; the same sigma.
    mixer = RobustFilterAttention(shape(), mu=[1e-1, 1e-3, 1e-5, 0.0], sigma_process=0.1, eta_k=0.3, sigma_0=0.2)
    record: dict = {}
    mixer(torch.randn(1, 64, WIDTH), TokenContext(rotary_tables(torch.arange(64), SIZE), record=record))
    lag = torch.arange(64).double()
    free = -(0.3**2 + 0.2**2 + 0.1**2 * lag).log()
    actual = record["log_kappa"][0, :, -1].flip(-1).double()
    gaps = (actual - free).abs().amax(-1)
    assert gaps[0] > 0.5 > gaps[1] > gaps[2] > gaps[3]
    assert gaps[3] < 1e-3


def test_with_one_head_all_projections_agree():  # H3 as a block
    x, outputs = torch.randn(2, LENGTH, WIDTH), []
    for projection in ("per_head", "global", "evidence"):
        torch.manual_seed(1)
        mixer = PolarAttention(shape(heads=1), projection=projection)
        outputs.append(mixer(x, TokenContext(rotary(mixer))))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-6, rtol=1e-5)


def test_with_several_heads_they_differ():
    x, outputs = torch.randn(2, LENGTH, WIDTH), []
    for projection in ("per_head", "global", "evidence", "none"):
        torch.manual_seed(1)
        mixer = PolarAttention(shape(), projection=projection, nu_t=[1.0, 2.0, 4.0, 8.0])
        outputs.append(mixer(x, TokenContext(rotary(mixer))))
    for i in range(4):
        for j in range(i):
            assert (outputs[i] - outputs[j]).abs().max() > 1e-4
