"""Token mixers: the attention half of a block, one file per idea."""

from polarlm.attention.mixer import KeyValueCache, Mixer, MixerShape
from polarlm.attention.standard import StandardAttention

__all__ = ["KeyValueCache", "Mixer", "MixerShape", "StandardAttention"]
