"""From tokens to loss: norms, feed-forward, blocks, GPT."""

from polarlm.model.gpt import GPT, Cache, GPTConfig

__all__ = ["GPT", "Cache", "GPTConfig"]
