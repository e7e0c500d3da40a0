"""One transformer block: a mixer and a feed-forward, and the residual frame that joins them to the stream.

Around each half of a block stands a connection: `read` makes the branch's input, `write` the new stream. A frame names
its connection and what follows from it for the rest of the model. A block's yaml chooses one (`frame`); otherwise
`model.frame` does. A new frame is a connection and a line in FRAMES.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.calibration import calibrate
from polarlm.attention.mixer import Mixer, MixerShape, TokenContext
from polarlm.errors import UserError
from polarlm.geometry import exp_map, tangential_part
from polarlm.geometry.sphere import add_tangential, on_sphere
from polarlm.model.config import GPTConfig
from polarlm.model.feed_forward import build_feed_forward
from polarlm.model.ngpt import UnitLength, Walk, scale_hidden_units, unit_matrices
from polarlm.operations import closed, operation


@operation
def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last axis, in fp32 or better; the result has x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), gain.shape, gain.to(wide), eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * gain."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has x's dtype."""
        return rms_norm(x, self.weight, self.eps)


class Sum:
    """A connection that adds the step."""

    def write(self, x: Tensor, step: Tensor) -> Tensor:
        """The stream and the step."""
        return x + step


class Raw(Sum, nn.Module):
    """x + branch(x): for a mixer that reads the stream as it is."""

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()

    def read(self, x: Tensor) -> Tensor:
        """The stream itself."""
        return x


class PreNorm(Sum, RMSNorm):
    """x + branch(norm x): the stream keeps its magnitude from layer to layer."""

    def __init__(self, shape: MixerShape) -> None:
        super().__init__(shape.d_model, shape.norm_eps)

    def read(self, x: Tensor) -> Tensor:
        """The stream at unit RMS, times a gain."""
        return self(x)


class PostNorm(RMSNorm):
    """norm(x + branch(x)): normalised after each addition, which discards the magnitude (Appendix E)."""

    def __init__(self, shape: MixerShape) -> None:
        super().__init__(shape.d_model, shape.norm_eps)

    def read(self, x: Tensor) -> Tensor:
        """The stream, which is normalised already."""
        return x

    def write(self, x: Tensor, step: Tensor) -> Tensor:
        """The sum, normalised."""
        return self(x + step)


class ScaledNorm(PreNorm):
    """LayerNorm scaling (Sun et al. 2025): what layer l = 1, 2, … reads is divided by sqrt(l)."""

    def __init__(self, shape: MixerShape) -> None:
        super().__init__(shape)
        self.scale = (shape.layer + 1) ** -0.5

    def read(self, x: Tensor) -> Tensor:
        """Deeper layers read less, so that the stream's variance grows more slowly."""
        return self(x) * self.scale


LONGEST_WALK = math.pi / 2  # radians: a longer one would turn back towards where it came from


class Geodesic(nn.Module):
    """GeoNorm (Zheng et al. 2026): the step's tangential part is walked along the sphere, so |x| never changes.

    x+ = x cos(theta) + (v/|v|) |x| sin(theta) with v = P_T(x) step and theta = |v|/|x| / sqrt(l) in layer l = 1, 2, …
    No walk is longer than a quarter circle: at the default learning rate branches grow beyond that, walks go round the
    sphere, and nothing is learned (docs/results.md, question 5).
    """

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()
        self.decay = (shape.layer + 1) ** -0.5

    def read(self, x: Tensor) -> Tensor:
        """The stream, which is on its sphere already."""
        return x

    def write(self, x: Tensor, step: Tensor) -> Tensor:
        """Exp_x of the tangential part of the step."""
        wide = torch.promote_types(x.dtype, torch.float32)
        point, step = x.to(wide), step.to(wide)
        step = self.decay * tangential_part(point, step)
        angle = step.norm(dim=-1, keepdim=True) / point.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return exp_map(point, step * (LONGEST_WALK / angle.clamp_min(LONGEST_WALK))).to(x.dtype)


@dataclass(frozen=True)
class Frame:
    """A connection, and what it asks of the rest of the model."""

    connection: Callable[[MixerShape], Any]  # around either half of a block
    raw: Callable[[MixerShape], Any] | None = None  # around a mixer with pre_norm = False; None: the same
    unit_stream: bool = False  # the stream has RMS 1 wherever a block reads it, behind the embedding too
    final: Callable[[int, float], nn.Module] = RMSNorm  # between the last block and the output, of (width, eps)
    output_scale: bool = False  # a learned factor for every word's logit
    around_feed_forward: Callable[[nn.Module], None] | None = None  # changes it in place
    after_step: Callable[[Any], None] | None = None  # puts the model's weights back where they belong

    def check(self, mixer: Mixer, tangent: tuple[bool, bool]) -> None:
        """Refuse a mixer that contradicts the frame, and warn of a switch that the frame leaves nothing to do."""
        if not mixer.pre_norm and self.connection is ScaledNorm:
            raise UserError(
                "model.frame=scaled scales what a norm hands to the block, and this block reads the raw stream; set "
                "block.inputs.norm_position=both, or another frame."
            )
        if mixer.tie_output and self.after_step is not None:
            raise UserError(
                "block/output=tied keeps W_v orthonormal, and model.frame=ngpt gives every row of it length 1; set "
                "block/output=free, or another frame."
            )
        if any(tangent) and self.connection is Geodesic and mixer.shape.layer == 0:
            warnings.warn(
                f"+tangent{'_both' * tangent[1]} has no effect with the frame geodesic, which walks along the "
                "tangential part of every step anyway",
                stacklevel=3,
            )

    def around(self, shape: MixerShape, *, raw: bool = False) -> Any:
        """The connection of one branch."""
        return (self.raw or self.connection)(shape) if raw else self.connection(shape)

    def embed(self, x: Tensor) -> Tensor:
        """The stream that enters the first block; fresh embeddings are small, so a norm's epsilon would count."""
        return on_sphere(x, 1.0)[1] if self.unit_stream else x


FRAMES = {
    "pre": Frame(PreNorm, raw=Raw),
    "post": Frame(PostNorm, unit_stream=True),
    "scaled": Frame(ScaledNorm),
    "geodesic": Frame(Geodesic, unit_stream=True),
    "ngpt": Frame(
        Walk,
        unit_stream=True,
        final=UnitLength,
        output_scale=True,
        around_feed_forward=scale_hidden_units,
        after_step=unit_matrices,
    ),
}


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
