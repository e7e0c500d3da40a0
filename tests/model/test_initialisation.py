"""One convention of initial scales for every block and width, so that blocks are compared and not their scales."""

import math
import os

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, StandardAttention, TokenContext
from polarlm.attention.calibration import calibrate, probe_rms
from polarlm.attention.initialisation import ATTENTION_RMS, FEED_FORWARD_RMS
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig
from polarlm.model.feed_forward import FEED_FORWARDS
from tests.contract.conftest import BLOCKS, mixer_of

# The printed algorithm's slips include its scales, nGPT normalises what leaves a branch, a tied output has no scale.
CALIBRATED = [name for name in BLOCKS if name not in ("polar_literal", "ngpt", "polar_output_tied")]
LAYERS, CONTEXT = 4, 64
WIDTHS = [64, 128, 256, 512, 1024] if "POLARLM_NIGHTLY" in os.environ else [64, 512]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def branch(make, width: int) -> dict[str, float]:
    """RMS of a fresh mixer's values and of what it adds to the stream, for a stream that calibration has not seen."""
    head = 32 if width < 256 else 64
    heads = width // head
    torch.manual_seed(width)
    mixer = make(MixerShape(width, heads, heads, head, layer=1, n_layer=LAYERS))
    calibrate(mixer)
    record, positions = {}, torch.arange(CONTEXT)
    x = mixer.input_rms * torch.randn(max(4, 4096 // width), CONTEXT, width)
    with torch.no_grad():
        rotary = rotary_tables(positions, mixer.rotary_dim)
        out = mixer(x, TokenContext(rotary, record=record, positions=positions))
    return {"values": rms(record["v"]), "out": rms(out)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CALIBRATED)
def test_every_attention_branch_adds_what_the_convention_says(name, width):
    measured = branch(mixer_of(name), width)
    # Shifted values are the mean of two tokens' at rates of about one half.
    assert measured["values"] == pytest.approx(0.75 if name == "fox_pro" else 1.0, rel=0.1)
    assert measured["out"] == pytest.approx(ATTENTION_RMS / math.sqrt(2 * LAYERS), rel=0.1)


@pytest.mark.parametrize(
    "switches",
    [
        dict(kernel="gaussian"),
        dict(projection="none", radial="none"),
        dict(projection="global"),
        dict(norm_position="post"),
        dict(norm_position="pre"),
        dict(lift=2),
        dict(retract="exp", radial="shared", beta=1.0),
        dict(irls_steps=3, nu_t=1.0),
    ],
)
def test_no_switch_of_polar_leaves_the_convention(switches):
    measured = branch(lambda shape: PolarAttention(shape, **switches), 128)
    assert measured["out"] == pytest.approx(ATTENTION_RMS / math.sqrt(2 * LAYERS), rel=0.1)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_first_layer_of_a_model_adds_it_too(kv_heads):
    size = GPTConfig(vocab_size=4096, context=CONTEXT, d_model=256, n_layer=2, n_head=8, n_kv_head=kv_heads)
    model, record = GPT(size, mixer_of("polar")), []
    with torch.no_grad():
        model(torch.randint(0, 4096, (4, CONTEXT)), record=record)
    added = record[0]["residual_mid"] - record[0]["residual_in"]
    assert rms(added) == pytest.approx(ATTENTION_RMS / 2, rel=0.1)


def test_calibration_leaves_zeros_the_random_numbers_and_the_mode_alone():
    shape = MixerShape(64, 2, 2, 32, layer=0, n_layer=LAYERS, dropout=0.5)
    torch.manual_seed(0)
    mixer = PolarAttention(shape)
    torch.nn.init.zeros_(mixer.out.weight)
    before = torch.get_rng_state()
    calibrate(mixer)
    assert mixer.training and (mixer.out.weight == 0).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("width", [64, 256, 1024])
@pytest.mark.parametrize("ffn", sorted(FEED_FORWARDS.keys() - {"none"}))
def test_every_feed_forward_branch_adds_what_the_convention_says(ffn, width):
    size = GPTConfig(vocab_size=61, context=CONTEXT, d_model=width, n_layer=LAYERS, n_head=2, ffn=ffn)
    model = GPT(size, StandardAttention)
    with torch.no_grad():
        out = model.blocks[0].feed_forward(torch.randn(1024, width))
    assert rms(out) == pytest.approx(FEED_FORWARD_RMS / math.sqrt(2 * LAYERS), rel=0.1)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("kind", ["width", "gpt2"])
def test_the_two_conventions_are_what_they_say(width, kind):
    size = GPTConfig(vocab_size=61, context=16, d_model=width, n_layer=8, n_head=4, init=kind)
    model = GPT(size, StandardAttention)
    for layer in model.blocks:
        for matrix, adds in (
            (layer.mixer.qkv, False),
            *([(layer.mixer.out, True)] if kind == "gpt2" else []),  # W_o's width rule is held by measurement, above
            (layer.feed_forward.gate_up, False),
            (layer.feed_forward.down, True),
        ):
            expected = 0.02 if kind == "gpt2" else matrix.in_features**-0.5
            expected /= math.sqrt(16) if adds else 1
            assert matrix.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_polars_magnitude_starts_at_one_under_either_convention():
    for kind in ("width", "gpt2"):
        shape = MixerShape(d_model=256, n_head=4, n_kv_head=4, head_dim=64, layer=0, n_layer=2, init=kind)
        assert rms(PolarAttention(shape).v(torch.randn(64, 256))) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("width", [64, 512])
def test_the_stream_a_raw_block_reads_has_the_size_it_expects(width):
    """norm_position=post reads the raw stream and starts with the gain that makes its magnitude one."""
    size = GPTConfig(vocab_size=61, context=CONTEXT, d_model=width, n_layer=LAYERS, n_head=4)
    model, record = GPT(size, lambda shape: PolarAttention(shape, norm_position="post")), []
    with torch.no_grad():
        model(torch.randint(0, 61, (4, CONTEXT)), record=record)
    for layer in record:
        assert 0.7 < layer["magnitude"].mean() < 1.4


@pytest.mark.parametrize("switches", [{}, {"projection": "evidence", "radial": "own", "beta": 0.0}])
def test_alpha_is_the_size_of_a_fresh_blocks_step(switches):
    shape = MixerShape(64, 4, 4, 16, layer=0, n_layer=2)
    steps = []
    for alpha in (1.0, 0.5, 3.0):
        torch.manual_seed(0)
        mixer = PolarAttention(shape, alpha=alpha, **switches)
        calibrate(mixer)
        steps.append(probe_rms(mixer))
    assert steps[0] == pytest.approx(0.35 / 2, rel=0.01)
    assert [step / steps[0] for step in steps] == pytest.approx([1.0, 0.5, 3.0], rel=1e-4)
