"""Token mixers: the attention half of a block, one file per idea."""

from polarlm.attention.mixer import Mixer, MixerShape, TokenContext
from polarlm.attention.polar import PolarAttention
from polarlm.attention.polar_literal import PolarLiteralAttention
from polarlm.attention.rfa import RobustFilterAttention
from polarlm.attention.standard import StandardAttention
from polarlm.attention.xsa import ExclusiveAttention

__all__ = [
    "ExclusiveAttention",
    "Mixer",
    "MixerShape",
    "PolarAttention",
    "PolarLiteralAttention",
    "RobustFilterAttention",
    "StandardAttention",
    "TokenContext",
]
