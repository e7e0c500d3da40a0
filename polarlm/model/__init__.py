"""From tokens to loss: norms, feed-forward, blocks, GPT."""

from typing import TYPE_CHECKING, Any

from polarlm.model.config import GPTConfig

if TYPE_CHECKING:
    from polarlm.model.gpt import GPT

__all__ = ["GPT", "GPTConfig"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; checking a size must not pay for it.
    if name == "GPT":
        from polarlm.model.gpt import GPT

        return GPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
