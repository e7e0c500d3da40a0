"""How fast each mode of each head turns with position: one bank for all, one slice of a bank per head, or learned.

Appendix F learns the frequencies; Appendix D.1 (as RFA's spectrally coupled variant) gives every head its own part of
the spectrum, slow heads first. Key heads own the frequencies; a query turns with the key head it looks at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from polarlm.attention.estimator import choice
from polarlm.attention.mixer import MixerShape, Rotary, TokenContext
from polarlm.geometry.transport import phase_tables, rotary_frequencies, rotary_tables

KINDS = ("shared", "per_head", "learned")


class Turns(NamedTuple):
    """Rotary tables of the queries (per query head) and of the keys and values (per key head)."""

    queries: Rotary
    keys: Rotary

    def recorded(self) -> dict[str, Tensor]:
        """The queries' tables, under the names by which a record knows them."""
        return {"rotary_cos": self.queries[0], "rotary_sin": self.queries[1]}


class Frequencies(nn.Module):
    """The rotary frequencies of one mixer."""

    optim_group = "estimator"  # angles per token are scalars of the model of motion, not weights
    log_frequency: Tensor

    def __init__(self, kind: str, shape: MixerShape, dim: int) -> None:
        super().__init__()
        self.kind = choice("frequencies", kind, KINDS)
        self.group, self.dim, self.base = shape.n_head // shape.n_kv_head, dim, shape.rope_base
        heads = shape.n_kv_head
        if kind == "per_head":  # the spectrum of heads*dim channels, cut into heads from slow to fast
            bank = rotary_frequencies(heads * dim, shape.rope_base, dtype=torch.float64).flip(0).view(heads, -1)
            self.register_buffer("log_frequency", bank.log().float(), persistent=False)
        elif kind == "learned":
            bank = rotary_frequencies(dim, shape.rope_base, dtype=torch.float64).expand(heads, -1)
            self.log_frequency = nn.Parameter(bank.log().float())

    def one_step(self, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Tables of a single token's turn, (1, dim/2) or (1, heads, 1, dim/2)."""
        if self.kind == "shared":
            return rotary_tables(torch.ones(1, device=device), self.dim, self.base, dtype=dtype)
        cos, sin = phase_tables(torch.ones(1, device=device), self.log_frequency.to(dtype).exp()[:, None])
        return cos[None], sin[None]

    def forward(self, context: TokenContext) -> Turns:
        """The tables for this pass: (T, dim/2) where all heads share them, else (1 or B, heads, T, dim/2)."""
        if self.kind == "shared":
            return Turns(context.rotary, context.rotary)
        if context.positions is None:
            raise ValueError(f"frequencies={self.kind} needs TokenContext.positions")
        # Phases stay in fp32 or better: they reach 1e3 rad, where bf16 has lost the angle altogether.
        frequencies = self.log_frequency.to(context.rotary[0].dtype).exp()
        positions = context.positions.expand(1, -1) if context.positions.dim() == 1 else context.positions
        cos, sin = phase_tables(positions[:, None], frequencies[:, None])
        if self.group == 1:
            return Turns((cos, sin), (cos, sin))
        return Turns((cos.repeat_interleave(self.group, 1), sin.repeat_interleave(self.group, 1)), (cos, sin))
