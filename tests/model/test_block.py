"""The residual frame: what each half adds to the stream, and what dropout does to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polarlm.attention import Mixer, MixerShape, StandardAttention, TokenContext
from polarlm.model import GPT, GPTConfig
from polarlm.model.block import Block

SHAPE = MixerShape(d_model=64, n_head=1, n_kv_head=1, head_dim=64, layer=0, n_layer=1)
CONTEXT = TokenContext(rotary=(torch.zeros(0), torch.zeros(0)))


class Constant(Mixer):
    """Adds the same number everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__(SHAPE)
        self.value = value

    def forward(self, x: torch.Tensor, context: TokenContext | None = None) -> torch.Tensor:
        return torch.full_like(x, self.value)


def block(mixer: float, feed_forward: float, dropout: float) -> nn.Module:
    return Block(Constant(mixer), Constant(feed_forward), replace(SHAPE, dropout=dropout))


def test_both_halves_add_to_the_stream():
    x = torch.randn(2, 8, 64)
    torch.testing.assert_close(block(1.0, 10.0, 0.5).eval()(x, CONTEXT), x + 11)


@pytest.mark.parametrize(("mixer", "feed_forward"), [(1.0, 0.0), (0.0, 1.0)])
def test_dropout_acts_on_what_either_half_adds(mixer, feed_forward):
    x = torch.zeros(2, 64, 64)
    added = block(mixer, feed_forward, 0.25).train()(x, CONTEXT)
    dropped = added == 0
    assert abs(dropped.float().mean() - 0.25) < 0.03
    torch.testing.assert_close(added[~dropped], torch.full_like(added[~dropped], 1 / 0.75))


def test_a_model_of_mixers_alone_adds_nothing_after_them():
    size = {"vocab_size": 16, "context": 8, "d_model": 16, "n_layer": 2, "n_head": 2}
    model = GPT(GPTConfig(**size, ffn="none"), StandardAttention)
    record = []
    model.hidden(torch.arange(8)[None], record=record)
    assert all(torch.equal(layer["residual_mid"], layer["residual_out"]) for layer in record)
    model.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
    assert all(p.grad is not None for p in model.parameters())  # which DDP asks for
    mixers = sum(p.numel() for block in model.blocks for p in block.mixer.parameters())
    assert model.parameter_count() == mixers + 16 * 16 + 5 * 16  # an embedding and five norms
