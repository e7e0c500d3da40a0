"""W_o = W_v transposed, W_v with orthonormal columns (docs/theory.md E11): a tangent step stays one in the stream.

<z, W_o Delta> = <W_v z, Delta> = m <v, Delta>: what Polar projects away in latent coordinates is then gone in the
residual stream too, and W_o W_v = I carries the latent state back exactly. PyTorch's orthogonal parametrisation keeps
W_v on its manifold, whatever the optimiser does.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def make_orthonormal(layer: nn.Linear) -> None:
    """Orthonormal columns (rows, where it has fewer outputs than inputs), now and after every step."""
    nn.init.orthogonal_(layer.weight)
    parametrizations.orthogonal(layer, "weight")
    # The optimiser asks the module that holds a parameter; decay would pull towards where the matrix started.
    layer.parametrizations.weight.optim_group = "no_decay"  # type: ignore[union-attr]


def tied_output(step: Tensor, values: nn.Linear, group: int) -> Tensor:
    """W_v^T of a step (B, T, H, Dh), (B, T, d); grouped value heads take the mean over their query heads."""
    if group > 1:
        step = step.unflatten(-2, (-1, group)).mean(-2)
    return F.linear(step.flatten(-2), values.weight.mT)
