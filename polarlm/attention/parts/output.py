"""Step 8 of Algorithm 1: back to the residual stream, by a matrix W_o or by W_v transposed.

`tie_output`: W_o = W_v^T, W_v with orthonormal columns (docs/theory.md E11): a tangent step is tangent in the stream.
<z, W_o Delta> = <W_v z, Delta> = m <v, Delta>: what Polar removes in latent coordinates is then removed from the
residual stream too, and W_o W_v = I maps the latent state back exactly. PyTorch's orthogonal parametrisation keeps
W_v on its manifold, whatever the optimiser does.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from polarlm.attention.additions import HeadGate
from polarlm.attention.initialisation import linear
from polarlm.attention.parts.part import Part

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention


class Output(Part):
    """W_o, or its replacement, and the gate that may weigh the heads first."""

    def __init__(self, block: PolarAttention, *, tie_output: bool, head_gate: bool) -> None:
        super().__init__(block)
        self.tie_output, self.head_gate = tie_output, head_gate
        shape = block.shape
        block.tie_output, block.calibrated = tie_output, not tie_output
        if tie_output:
            make_orthonormal(block.v)
        else:
            inner = shape.n_head * block.rotary_dim
            block.out = linear(inner, shape.d_model, shape.initial.residual(inner))
        block.head_gate = HeadGate(shape, raw_stream=not block.pre_norm) if head_gate else None

    def tied(self, step: Tensor) -> Tensor:
        """W_v^T of a step (B, T, H, Dh), (B, T, d); grouped value heads take the mean over their query heads."""
        group = self.block.shape.n_head // self.block.shape.n_kv_head
        if group > 1:
            step = step.unflatten(-2, (-1, group)).mean(-2)
        return F.linear(step.flatten(-2), self.block.v.weight.mT)

    def check(self) -> None:
        """Warn where a tied step is tangent to the stream only while gains or gates are equal."""
        inputs, projection = self.block.parts.inputs, self.block.parts.step.projection
        if not self.tie_output or self.block.shape.layer != 0:
            return
        if self.head_gate and projection in ("global", "evidence"):
            warnings.warn(
                f"block/output=tied with block.output.head_gate=true: gates that differ between heads turn a step of "
                f"block.step.projection={projection} out of the tangent space; block.step.projection=per_head stays "
                "in it",
                stacklevel=3,
            )
        if inputs.norm_position == "both":
            warnings.warn(
                "block/output=tied with block.inputs.norm_position=both: the gains of the norm between stream and "
                "values make steps tangent to the stream only while they are equal; block.inputs.norm_position=post "
                "or pre has no such gains",
                stacklevel=3,
            )

    def unused(self) -> set[str]:
        """Orthonormal values have no scale to decay."""
        return {"value_weight_decay"} if self.tie_output else set()

    def flops_per_token(self, context: int) -> int:
        """A tied output is the value projection once more."""
        layer, gate = self.block.v if self.tie_output else self.block.out, self.block.head_gate
        return 2 * layer.weight.numel() + (0 if gate is None else gate.flops_per_token())


def make_orthonormal(layer: nn.Linear) -> None:
    """Orthonormal columns (rows, where it has fewer outputs than inputs), now and after every step."""
    nn.init.orthogonal_(layer.weight)
    parametrizations.orthogonal(layer, "weight")
    # The optimiser asks the module that holds a parameter; decay would pull towards where the matrix started.
    layer.parametrizations.weight.optim_group = "no_decay"  # type: ignore[union-attr]
