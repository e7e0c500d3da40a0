"""xPos (Sun et al. 2022): RoPE whose modes also decay with the lag, fast modes first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarlm.attention.mixer import MixerShape, TokenContext
from polarlm.attention.parts.transport import Turns
from polarlm.attention.standard import StandardAttention
from polarlm.errors import UserError
from polarlm.geometry.transport import rotate

GAMMA = 0.4  # the published shift


class XPosAttention(StandardAttention):
    """Mode i of a query at n is scaled by zeta_i^(n/scale), of a key by its inverse: together zeta_i^(lag/scale).

    zeta_i = (i/(Dh/2) + gamma)/(1 + gamma). Both factors are kept in fp32, which holds up to about 30,000 positions at
    the published scale of 512.
    """

    log_zeta: Tensor

    def __init__(self, shape: MixerShape, *, scale: float = 512.0, **standard: Any) -> None:
        super().__init__(shape, **standard)
        if not scale > 0:
            raise UserError(f"block.scale is {scale}; it must be positive: tokens over which a mode fades by zeta.")
        modes = shape.head_dim // 2
        # Our modes run from fast to slow, as the paper's do.
        zeta = (torch.arange(modes, dtype=torch.float64) / modes + GAMMA) / (1 + GAMMA)
        self.register_buffer("log_zeta", (zeta.log() / scale).repeat(2).float(), persistent=False)

    def place(self, q: Tensor, k: Tensor, turns: Turns, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated and scaled by position."""
        positions = context.positions
        if positions is None:
            raise ValueError("xpos needs TokenContext.positions")
        wide = torch.promote_types(q.dtype, torch.float32)
        power = positions.to(wide).unsqueeze(-1) * self.log_zeta.to(wide)  # (T, Dh) or (B, T, Dh)
        power = power if power.dim() == 2 else power.unsqueeze(1)
        q, k = rotate(q, *turns.queries), rotate(k, *turns.keys)
        return (q * power.exp()).to(q.dtype), (k * (-power).exp()).to(k.dtype)
