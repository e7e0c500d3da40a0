"""From a resolved configuration to a model."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.model.config import FRAME_NAMES
from polarlm.settings import read_settings
from polarlm.targets import target_of


def build_model(config: dict[str, Any], vocab_size: int) -> GPT:
    """The GPT that `model` and `block` describe, with freshly initialised weights; safe for a stranger's config."""
    mixer, options = target_of(config["block"], "block")
    model = config["model"] | frame_of(options.pop("frame", None), config["model"])
    size = read_settings(GPTConfig, {**model, "vocab_size": vocab_size}, "model")
    try:
        return GPT(size, functools.partial(mixer, **options))
    except TypeError as error:  # a key that the block does not have (added with `+`)
        raise UserError(f"block has a key it does not know: {error}") from error


def frame_of(block_frame: str | None, model: dict[str, Any]) -> dict[str, str]:
    """The residual frame that a block's yaml asks for, as a setting of the model; nothing when it asks for none."""
    if block_frame is None:
        return {}
    if block_frame not in FRAME_NAMES:
        raise UserError(f"block.frame is {block_frame!r}; allowed: {', '.join(FRAME_NAMES)}.")
    chosen = model.get("frame", "pre")
    if chosen not in ("pre", block_frame):
        raise UserError(f"block.frame={block_frame} and model.frame={chosen} name two frames; leave out model.frame.")
    return {"frame": block_frame}


def warn_about_idle_settings(model: GPT, block: dict[str, Any]) -> None:
    """Say which hyperparameters were set although the chosen switches leave no use for them."""
    mixer: Any = model.blocks[0].mixer
    if not hasattr(mixer, "without_effect"):
        return
    defaults = inspect.signature(type(mixer)).parameters
    for name in sorted(mixer.without_effect()):
        if name in block and block[name] != defaults[name].default:
            warnings.warn(
                f"block.{name}={block[name]} has no effect with the other settings of this block", stacklevel=2
            )
