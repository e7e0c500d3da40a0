"""From a resolved configuration to a model."""

from __future__ import annotations

from typing import Any

from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig


def build_model(config: dict[str, Any], vocab_size: int) -> GPT:
    """The GPT that `model` and `block` describe, with freshly initialised weights."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return GPT(GPTConfig(vocab_size=vocab_size, **config["model"]), instantiate(config["block"]))
    except InstantiationException as error:
        raise UserError(f"block={config['choices']['block']} can't be built: {error}") from error
    except TypeError as error:  # a key that the block or the model does not have (added with `+`)
        raise UserError(f"model or block has a key it does not know: {error}") from error
