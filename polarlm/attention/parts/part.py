"""What every part of the polar block has: its settings, its scalars, its checks, what is idle, and what it costs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

OFF = {"off": "none", "false": "none"}  # what a yaml or a command line makes of `off`


class Part:
    """One part of a polar block; its settings are its keyword arguments, kept as attributes of the same names.

    Matrices are registered in the block, under the names that checkpoints have: a part finds them in `self.block`.
    """

    def __init__(self, block: PolarAttention) -> None:
        self.block = block
        self.scalars: dict[str, Tensor] = {}  # initial values of the positive parameters that it brings

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """The settings that it takes, with their defaults; inspect.Parameter.empty where it must be given one."""
        parameters = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def check(self) -> None:
        """Warn of settings that leave another part less than it promises; called when all parts are there."""

    def unused(self) -> set[str]:
        """Settings, of any part, that this part's choices leave no use for; such parameters do not exist."""
        return set()

    def flops_per_token(self, context: int) -> int:
        """Forward FLOPs per token that this part adds."""
        return 0
