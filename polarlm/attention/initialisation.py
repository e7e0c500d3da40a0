"""How large fresh matrices are: one convention for every block, so that blocks are compared and not their scales.

`width`: a hidden matrix has deviation 1/sqrt(fan_in), so unit-RMS inputs give unit-RMS outputs at any width; the 2L
maps that add to the residual stream are smaller by sqrt(2L), so that all of them together add a fixed variance.
`gpt2`: 0.02 for every matrix, residual maps likewise smaller (GPT-2's choice for d = 768; far too small for d = 128).
With `zero`, residual maps are zero under either: every branch starts silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

GPT2_STD = 0.02
# What a fresh branch hands to its residual map, as RMS per channel: attention an average of unit values (0.30 to 0.42
# for context 64, block by block), a feed-forward unit Gaussians behind SiLU or GELU.
ATTENTION_RMS, FEED_FORWARD_RMS = 0.35, 0.6


@dataclass(frozen=True)
class Initialisation:
    """The deviations of one model's matrices."""

    kind: str = "width"  # width | gpt2
    n_layer: int = 1  # residual maps share out what the whole depth may add
    zero: bool = False  # residual maps start at zero

    def hidden(self, fan_in: int) -> float:
        """Deviation of a matrix inside a block."""
        return fan_in**-0.5 if self.kind == "width" else GPT2_STD

    def residual(self, fan_in: int) -> float:
        """Deviation of a matrix whose output is added to the residual stream."""
        return 0.0 if self.zero else self.hidden(fan_in) / (2 * self.n_layer) ** 0.5

    def added_rms(self, d_model: int, layers: float, attention: float = ATTENTION_RMS) -> float:
        """RMS per channel of what `layers` fresh layers have added to the stream."""
        if self.zero:
            return 0.0
        if self.kind == "width":
            return (layers * (attention**2 + FEED_FORWARD_RMS**2) / (2 * self.n_layer)) ** 0.5
        # Values on the sphere have RMS 1 whatever the convention; a feed-forward then adds about GPT2_STD.
        values = 0.6 * (d_model / (2 * self.n_layer)) ** 0.5
        return GPT2_STD * (layers * (values**2 + 1)) ** 0.5


def linear(d_in: int, d_out: int, std: float) -> nn.Linear:
    """A bias-free linear map with normally distributed weights."""
    layer = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer
