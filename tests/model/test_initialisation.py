"""One convention of initial scales for every block and width, so that blocks are compared and not their scales."""

import math

import pytest
import torch

from polarlm.attention import MixerShape, PolarAttention, StandardAttention, TokenContext
from polarlm.geometry import rotary_tables
from polarlm.model import GPT, GPTConfig
from tests.contract.conftest import BLOCKS, mixer_of

TRAINABLE = [
    name for name in BLOCKS if name != "polar_literal"
]  # the slips of the printed algorithm include its scales
LAYERS, CONTEXT = 4, 64


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def branch(name: str, width: int) -> dict[str, float]:
    """RMS of a fresh mixer's values, of what its heads send to the residual map, and of what leaves that map."""
    head = 32 if width < 256 else 64
    heads = width // head
    shape = MixerShape(width, heads, heads, head, layer=0, n_layer=LAYERS)
    torch.manual_seed(width)
    mixer, record, positions = mixer_of(name)(shape), {}, torch.arange(CONTEXT)
    x = torch.randn(2, CONTEXT, width)  # a normalised stream
    with torch.no_grad():
        rotary = rotary_tables(positions, mixer.rotary_dim)
        out = mixer(x, TokenContext(rotary, record=record, positions=positions))
    return {"values": rms(record["v"]), "heads": rms(record["update"]), "out": rms(out)}


@pytest.mark.parametrize("width", [64, 128, 256, 1024])
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_attention_branch_starts_at_the_same_scale(name, width):
    scale, standard = branch(name, width), branch("standard", width)
    assert scale["values"] == pytest.approx(1.0, rel=0.1)
    assert scale["out"] == pytest.approx(scale["heads"] / math.sqrt(2 * LAYERS), rel=0.1)
    # Weights differ from block to block, and with them how much an average of independent values shrinks.
    assert scale["out"] == pytest.approx(standard["out"], rel=0.3)


@pytest.mark.parametrize("width", [64, 256, 1024])
@pytest.mark.parametrize(
    ("ffn", "hidden"), [("swiglu", 0.597), ("gelu", 0.652), ("relu2", 0.6)]
)  # RMS of silu(g)u and gelu(g), g ~ N(0,1); the square of ReLU is scaled to theirs
def test_every_feed_forward_branch_starts_at_the_same_scale(ffn, hidden, width):
    size = GPTConfig(vocab_size=61, context=CONTEXT, d_model=width, n_layer=LAYERS, n_head=2, ffn=ffn)
    model = GPT(size, StandardAttention)
    with torch.no_grad():
        out = model.blocks[0].feed_forward(torch.randn(64, width))
    assert rms(out) == pytest.approx(hidden / math.sqrt(2 * LAYERS), rel=0.1)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("kind", ["width", "gpt2"])
def test_the_two_conventions_are_what_they_say(width, kind):
    size = GPTConfig(vocab_size=61, context=16, d_model=width, n_layer=8, n_head=4, init=kind)
    model = GPT(size, StandardAttention)
    for layer in model.blocks:
        for matrix, adds in (
            (layer.mixer.qkv, False),
            (layer.mixer.out, True),
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
