"""polarlm: does a better transformer block make a better language model?"""

from typing import TYPE_CHECKING, Any

from polarlm.startup import avoid_broken_tiles

if TYPE_CHECKING:
    from polarlm.model.layers import PolarBlock, PolarSelfAttention

__version__ = "0.1.0"
__all__ = ["PolarBlock", "PolarSelfAttention"]


avoid_broken_tiles()  # before torch computes anything


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; most commands do without it.
    if name in __all__:
        from polarlm.model import layers

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
