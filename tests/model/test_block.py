"""The residual frame: what each half adds to the stream, and what dropout does to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polarlm.attention import Mixer, MixerShape, TokenContext
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
