"""From tokens to loss: norms, feed-forward, blocks, GPT."""

from typing import TYPE_CHECKING, Any

from polarlm.model.config import GPTConfig

if TYPE_CHECKING:
    from polarlm.model.gpt import GPT, Cache

__all__ = ["GPT", "Cache", "GPTConfig"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; checking a size must not pay for it.
    if name in ("GPT", "Cache"):
        from polarlm.model import gpt

        return getattr(gpt, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
