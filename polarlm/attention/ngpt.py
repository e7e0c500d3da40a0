"""The normalised Transformer's attention (nGPT, Loshchilov et al. 2024); its frame is polarlm/model/ngpt.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.parts.transport import Turns
from polarlm.attention.standard import StandardAttention
from polarlm.geometry.sphere import on_sphere
from polarlm.geometry.transport import rotate


class NormalisedAttention(StandardAttention):
    """softmax(sqrt(Dh) (s q_i/|q_i|) . (s k_j/|k_j|)) after rotation, s learned per head and channel.

    s multiplies both sides, so the query is multiplied by its square and all query heads share the same keys.
    """

    calibrated = False  # the frame normalises what leaves W_o

    def __init__(self, shape: MixerShape, rotate_values: bool = False, frequencies: str = "shared") -> None:
        super().__init__(shape, False, rotate_values, frequencies)
        self.qk_scale = nn.Parameter(torch.full((shape.n_head, 1, shape.head_dim), shape.d_model**-0.5))

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised to RMS 1 and rotated; RMS 1 gives the factor sqrt(Dh) instead of 1/sqrt(Dh)."""
        s = self.qk_scale * self.shape.d_model**0.5  # kept as s' = s scale/init, with init 1 and scale 1/sqrt(d)
        q, k = (on_sphere(rotate(part, *tables), 1.0)[1] for part, tables in ((q, turns.queries), (k, turns.keys)))
        return q * s.square().to(q.dtype), k
