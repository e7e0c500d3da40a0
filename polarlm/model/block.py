"""One transformer block: two branches, a mixer and a feed-forward, and the connections that join them to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention.calibration import calibrate
from polarlm.attention.mixer import Mixer, MixerShape, TokenContext
from polarlm.geometry.sphere import add_tangential, tangential_part
from polarlm.model.config import GPTConfig
from polarlm.model.feed_forward import build_feed_forward
from polarlm.model.frames import FRAMES, Sum
from polarlm.operations import closed, operation


class Block(nn.Module):
    """A mixer and a feed-forward inside a residual frame; a mixer with `pre_norm = False` reads the raw stream."""

    mixer: Mixer
    feed_forward: nn.Module

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: nn.Module,
        shape: MixerShape,
        frame: str = "pre",
        tangent: tuple[bool, bool] = (False, False),
    ) -> None:
        super().__init__()
        FRAMES[frame].check(mixer, tangent)
        self.tangent = tangent  # whether what the mixer, and what the feed-forward adds is projected off the stream
        self.mixer_norm = FRAMES[frame].around(shape, raw=not mixer.pre_norm)
        self.mixer = mixer
        self.ffn_norm = FRAMES[frame].around(shape)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, context: TokenContext) -> Tensor:
        """(B, T, d) -> (B, T, d); block.backend=reference takes nothing from polarlm/fast."""
        if self.mixer.backend == "reference" and not torch.compiler.is_compiling():
            with closed():
                return self._forward(x, context)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: TokenContext) -> Tensor:
        step = self.mixer(self.mixer_norm.read(x), context)
        middle = self._join(self.mixer_norm, x, step, self.tangent[0])
        step = self.feed_forward(self.ffn_norm.read(middle))
        after = self._join(self.ffn_norm, middle, step, self.tangent[1])
        if context.record is not None:
            context.record.update(residual_in=x, residual_mid=middle, residual_out=after)
        return after

    def _join(self, connection: Any, x: Tensor, step: Tensor, tangent: bool) -> Tensor:
        """The stream after a branch; `tangent` leaves out what the step has along the stream (docs/theory.md, E11)."""
        if self.dropout.p:
            step = self.dropout(step)
        if isinstance(connection, Sum):
            return add_tangential(x, step) if tangent else x + step
        if tangent:
            wide = torch.promote_types(x.dtype, torch.float32)
            step = tangential_part(x.to(wide), step.to(wide)).to(step.dtype)
        return connection.write(x, step)


def mixer_shape(config: GPTConfig, layer: int, stream_std: float) -> MixerShape:
    """What the mixer of layer 0, 1, … is told about a model of this size."""
    c = config
    return MixerShape(
        d_model=c.d_model, n_head=c.n_head, n_kv_head=c.kv_heads, head_dim=c.head_size,
        layer=layer, n_layer=c.n_layer, dropout=c.dropout, norm_eps=c.norm_eps, rope_base=c.rope_base,
        stream_std=stream_std, init=c.init, zero_init=c.zero_init,
    )  # fmt: skip


def build_block(config: GPTConfig, shape: MixerShape, mixer: Callable[[MixerShape], Mixer]) -> Block:
    """A fresh block; `mixer` makes its attention half, whose W_o is then calibrated."""
    feed_forward = build_feed_forward(config.ffn, config.d_model, config.ffn_mult, shape.initial, config.ffn_width)
    if (change := FRAMES[config.connection].around_feed_forward) is not None:
        change(feed_forward)
    attention = mixer(shape)
    calibrate(attention)
    return Block(attention, feed_forward, shape, config.connection, config.tangent)


@operation
def decode_layer(block: Block, x: Tensor, context: TokenContext) -> Tensor:
    """The stream after a block, for the next tokens x (B, T, d) of the text in context.cache."""
    return block(x, context)
