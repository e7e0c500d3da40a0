"""Initial scales of matrices: one convention for every block, so that comparisons do not depend on them.

`width`: a hidden matrix has deviation 1/sqrt(fan_in), so unit-RMS inputs give unit-RMS outputs at any width; the 2L
maps that add to the residual stream are smaller by sqrt(2L), so that all of them together add a fixed variance; W_o is
then scaled so that every attention branch adds exactly that (`calibration`).
`gpt2`: 0.02 for every matrix, residual maps likewise smaller (GPT-2's choice for d = 768; far too small for d = 128).
With `zero`, residual maps are zero under either: every branch starts silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

GPT2_STD = 0.02
# What a fresh branch adds to the stream, as RMS per channel and times sqrt(2L): attention about what an average of unit
# values over PROBE_LENGTH tokens leaves, a feed-forward what SiLU or GELU leave of unit Gaussians.
ATTENTION_RMS, FEED_FORWARD_RMS = 0.35, 0.6
PROBE_LENGTH = 64  # tokens


@dataclass(frozen=True)
class Initialisation:
    """The deviations of one model's matrices."""

    kind: str = "width"  # width | gpt2
    n_layer: int = 1  # residual maps share out what the whole depth may add
    zero: bool = False  # residual maps start at zero

    def hidden(self, fan_in: int) -> float:
        """Deviation of a matrix inside a block."""
        return fan_in**-0.5 if self.kind == "width" else GPT2_STD

    def residual(self, fan_in: int, scale: float = 1.0) -> float:
        """Deviation of a matrix whose output is added to the residual stream; `scale` as `width` needs it."""
        deviation = self.hidden(fan_in) / (2 * self.n_layer) ** 0.5 * (scale if self.kind == "width" else 1.0)
        return 0.0 if self.zero else deviation

    def added_rms(self, d_model: int, layers: float) -> float:
        """RMS per channel of what `layers` fresh layers have added to the stream."""
        if self.zero:
            return 0.0
        if self.kind == "width":
            return (layers * (ATTENTION_RMS**2 + FEED_FORWARD_RMS**2) / (2 * self.n_layer)) ** 0.5
        # Values on the sphere have RMS 1 whatever the convention; a feed-forward then adds about GPT2_STD.
        values = 0.6 * (d_model / (2 * self.n_layer)) ** 0.5
        return GPT2_STD * (layers * (values**2 + 1)) ** 0.5


def linear(d_in: int, d_out: int, std: float) -> nn.Linear:
    """A bias-free linear map with normally distributed weights."""
    layer = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer
