"""A past that fades: what the gate says, what becomes of it in the blocks, and where it is the paper's own decay."""

import math

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, StandardAttention, TokenContext
from polarlm.attention.parts.forgetting import FORGOTTEN, ForgetGate
from polarlm.attention.xsa import ExclusiveAttention
from polarlm.errors import UserError
from polarlm.geometry import rotary_tables
from polarlm.model.block import Block, decode_layer
from polarlm.model.feed_forward import build_feed_forward

WIDTH, HEADS, LENGTH = 32, 4, 21


def shape(**changes) -> MixerShape:
    return MixerShape(**dict(d_model=WIDTH, n_head=HEADS, n_kv_head=HEADS, head_dim=8, layer=0, n_layer=2) | changes)


def context(mixer, length=LENGTH, start=0, **more) -> TokenContext:
    positions = torch.arange(start, start + length)
    return TokenContext(rotary_tables(positions, mixer.rotary_dim), positions=positions, **more)


def test_a_constant_rate_is_the_papers_decay_of_precision_without_floors():
    torch.manual_seed(0)
    mu = 0.2
    common = dict(kernel="gaussian", m_inf=0.0, eta_tk=0.0, sigma_t0=0.7, mu_spread=False)
    decays = PolarAttention(shape(), mu=mu, forgetting="none", **common).double()
    bias = -math.log(math.expm1(2 * mu))  # sigmoid(b) = exp(-2 mu)
    fades = PolarAttention(shape(), mu=0.0, forgetting="constant", forget_bias=bias, **common).double()
    fades.load_state_dict(
        decays.state_dict() | {k: v for k, v in fades.state_dict().items() if "forget" in k}, strict=False
    )
    x, records = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), [{}, {}]
    for mixer, record in zip((decays, fades), records):
        mixer(x, context(mixer, record=record))
    for name in ("weights", "log_evidence"):
        torch.testing.assert_close(records[0][name], records[1][name], rtol=1e-6, atol=1e-7)


def test_a_filter_with_a_forgetting_factor_has_the_same_mean():
    """Recursion P <- lambda P + kappa, mean <- (lambda P mean + kappa z)/P, of a head that knows precisions only."""
    torch.manual_seed(1)
    switches = dict(kernel="gaussian", projection="none", rotate_values=False, mu=0.0)
    mixer = PolarAttention(shape(), **switches).double()
    x, record = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), {}
    mixer(x, context(mixer, record=record))
    kept = record["log_forget"].exp()[0]  # (H, T)
    for head in range(HEADS):
        total, mean = torch.zeros(()).double(), torch.zeros(8).double()
        for t in range(LENGTH):
            kappa, z = record["log_kappa"][0, head, t, t].exp(), record["v"][0, head, t]
            mean, total = kept[head, t] * total * mean + kappa * z, kept[head, t] * total + kappa
            mean = mean / total
            torch.testing.assert_close(record["v_bar"][0, head, t], mean, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(record["log_evidence"][0, head, t], total.log(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixer_class", [StandardAttention, ExclusiveAttention])
def test_gates_that_forget_nothing_leave_attention_as_it_was(mixer_class):
    torch.manual_seed(2)
    plain = mixer_class(shape(), qk_norm=True, rotate_values=True).double()
    open_gate = mixer_class(shape(), qk_norm=True, rotate_values=True, forgetting="constant", forget_bias=60.0).double()
    open_gate.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(open_gate(x, context(plain)), plain(x, context(plain)), rtol=1e-6, atol=1e-8)


def test_gates_that_forget_everything_leave_the_token_alone():
    torch.manual_seed(3)
    mixer = StandardAttention(shape(), forgetting="constant", forget_bias=-60.0)
    x, record = torch.randn(2, LENGTH, WIDTH), {}
    mixer(x, context(mixer, record=record))
    torch.testing.assert_close(record["weights"], torch.eye(LENGTH).expand(2, HEADS, LENGTH, LENGTH), atol=1e-6, rtol=0)


@pytest.mark.parametrize("forgetting", ["constant", "content"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_rows_and_record_of_a_block_that_forgets(forgetting, dropout):
    """The recorded weights are those that the fast path uses, with dropout left out of them."""
    torch.manual_seed(4)
    mixer = StandardAttention(shape(dropout=dropout), forgetting=forgetting).eval()
    x, record = torch.randn(2, LENGTH, WIDTH), {}
    out = mixer(x, context(mixer, record=record))
    torch.testing.assert_close(mixer(x, context(mixer)), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(record["weights"] @ record["v"], record["v_bar"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("forgetting", ["constant", "content"])
@pytest.mark.parametrize("block", [StandardAttention, PolarAttention])
def test_decoding_piece_by_piece_takes_the_sums_along(block, forgetting, native):
    """Several tokens, then one by one, then several again: native decoding leaves the cache as the long way would."""
    torch.manual_seed(5)
    size = 16 if native else 8
    mixer = block(shape(head_dim=size), forgetting=forgetting, forget_bias=[-1.0, 0.0, 1.0, 3.0]).eval()
    block = Block(mixer, build_feed_forward("gelu", WIDTH, 2.0, mixer.shape.initial), mixer.shape).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        whole = block(x, context(mixer))
        cache, pieces, start = mixer.new_cache(2, LENGTH, x.device, x.dtype), [], 0
        for length in (5, 1, 1, 1, 6, 1, 6):
            at = context(mixer, length, start, cache=cache)
            pieces.append(decode_layer(block, x[:, start : start + length], at))
            start += length
            assert cache.running[FORGOTTEN].shape == (2, HEADS, start) and cache.length == start
        assert bool(cache.decoder) == native
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=2e-5, rtol=1e-4)


def test_a_gate_of_a_raw_stream_does_not_feel_its_length():
    torch.manual_seed(6)
    x = torch.randn(1, LENGTH, WIDTH)
    raw, normed = (ForgetGate(shape(), "content", 0.5, raw_stream=raw) for raw in (True, False))
    assert torch.allclose(raw(x), raw(5 * x), atol=1e-5) and not torch.allclose(normed(x), normed(5 * x), atol=1e-2)


@pytest.mark.parametrize(("settings", "said"), [
    (dict(forgetting="often"), "block.forgetting"),
    (dict(forget_bias=[1.0, 2.0]), "block.forget_bias has 2 values"),
    (dict(forget_bias=math.inf), "block.forget_bias"),
])  # fmt: skip
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        PolarAttention(shape(), **settings)
