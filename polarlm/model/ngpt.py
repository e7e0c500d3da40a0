"""The normalised Transformer's frame (nGPT, Loshchilov et al. 2024): states and weights live on spheres.

Written for a stream of RMS 1 where the paper has length 1: the same function, since every branch is normalised.
A learned factor s is kept as s' with s = s' init/scale, so that one learning rate suits factors of any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polarlm.attention.mixer import MixerShape
from polarlm.geometry.sphere import on_sphere


class Factor(nn.Module):
    """A learned factor per channel that starts at `init` and moves as fast as a parameter of size `scale`."""

    def __init__(self, *size: int, init: float, scale: float) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full(size, scale))
        self.ratio = init / scale

    def forward(self) -> Tensor:
        """The factor."""
        return self.raw * self.ratio


class Walk(nn.Module):
    """h <- Norm(h + alpha (Norm(branch h) - h)), alpha learned per channel and not negative.

    alpha starts at 1/L: the published 0.05 is "of order 1/L" for its 24 and 36 layers.
    """

    def __init__(self, shape: MixerShape) -> None:
        super().__init__()
        self.rate = Factor(shape.d_model, init=1 / shape.n_layer, scale=shape.d_model**-0.5)

    def read(self, x: Tensor) -> Tensor:
        """The state, which is on the sphere already."""
        return x

    def write(self, x: Tensor, step: Tensor) -> Tensor:
        """A part of the way towards what the branch says, back on the sphere."""
        target = on_sphere(step, 1.0)[1]
        return on_sphere(x + self.rate().abs().to(x.dtype) * (target - x), 1.0)[1]


class UnitLength(nn.Module):
    """The last state at length 1, as the logits want it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.scale = dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) of RMS 1 -> of length 1."""
        return x * self.scale


class ScaledLinear(nn.Linear):
    """A linear map with a learned factor per output, which unit rows can't express."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device=linear.weight.device)
        self.weight = linear.weight
        self.factor = Factor(linear.out_features, init=1.0, scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """s * W x."""
        return super().forward(x) * self.factor().to(x.dtype)


def scale_hidden_units(feed_forward: nn.Module) -> None:
    """s_u and s_v of nGPT; a stream of RMS 1 brings the sqrt(d) of the gate with it."""
    for name, child in list(feed_forward.named_children()):
        if isinstance(child, nn.Linear) and name != "down":
            setattr(feed_forward, name, ScaledLinear(child))


@torch.no_grad()
def unit_matrices(model: Any) -> None:
    """Every row that meets the stream, and every column that is added to it, gets length 1."""
    _unit(model.embedding.weight, 1)
    _unit(model.head.weight, 1)
    for block in model.blocks:
        writes = {id(block.mixer.out), id(getattr(block.feed_forward, "down", None))}
        for module in block.modules():
            if isinstance(module, nn.Linear):
                _unit(module.weight, 0 if id(module) in writes else 1)


def _unit(weight: Tensor, axis: int) -> None:
    weight.div_(torch.linalg.vector_norm(weight, dim=axis, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny))
