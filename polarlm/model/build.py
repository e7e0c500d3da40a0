"""From a resolved configuration to a model."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from polarlm.attention.mixer import Mixer
from polarlm.block_keys import OLD, current_block, is_parted, part_settings
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.model.config import FRAME_NAMES
from polarlm.settings import read_settings
from polarlm.targets import target_of

PROBED_TOKENS = 32
LEAST_ATTENTION = 1e-3  # less than this to all earlier tokens together, in every head of every layer, is blindness


def build_model(config: dict[str, Any], vocab_size: int, *, stored: bool = False) -> GPT:
    """The GPT that `model` and `block` describe, with fresh weights; `stored`: a run folder holds the configuration."""
    mixer, options = target_of(current_block(config["block"]), "block", Mixer, stored=stored)
    model = config["model"] | frame_of(options.pop("frame", None), config["model"])
    size = read_settings(GPTConfig, {**model, "vocab_size": vocab_size}, "model")
    try:
        return GPT(size, functools.partial(mixer, **options))
    except TypeError as error:  # a key that the block does not have (added with `+`)
        raise UserError(f"block has an unknown setting: {error}") from error


def frame_of(block_frame: str | None, model: dict[str, Any]) -> dict[str, str]:
    """The residual frame that a block's yaml asks for, as a setting of the model; nothing when it asks for none."""
    if block_frame is None:
        return {}
    if block_frame not in FRAME_NAMES:
        raise UserError(f"block.frame is {block_frame!r}; allowed: {', '.join(FRAME_NAMES)}.")
    (block_base, plus, block_suffix), (base, _, suffix) = (
        frame.partition("+") for frame in (block_frame, model.get("frame", "pre"))
    )
    if (base not in ("pre", block_base) and block_base != "pre") or (suffix and suffix != block_suffix):
        raise UserError(
            f"block.frame={block_frame} and model.frame={model['frame']} name two frames; leave out model.frame."
        )
    return {"frame": f"{base if block_base == 'pre' else block_base}{plus}{block_suffix}"}


@torch.no_grad()
def warn_about_blind_blocks(model: GPT) -> None:
    """Warn when a fresh model attends to nothing but the token itself: some decay or noise is far off its scale."""
    tokens = torch.arange(min(PROBED_TOKENS, model.config.context))[None] % model.config.vocab_size
    if tokens.numel() < 2 or model.embedding.weight.is_meta:
        return
    training, records = model.training, list[dict[str, torch.Tensor]]()
    model.eval().hidden(tokens.to(model.embedding.weight.device), record=records)
    model.train(training)
    seen = [
        record["weights"].tril(-1)[..., 1:, :].sum(-1).mean((0, 2)).max() for record in records if "weights" in record
    ]
    if seen and max(seen) < LEAST_ATTENTION:
        warnings.warn(
            "In the untrained model every token attends only to itself, so it cannot see its past. Check "
            "block.mu, block.forget_bias, block.nu and the noises (block.eta…, block.sigma…)",
            stacklevel=2,
        )


def warn_about_idle_settings(model: GPT, block: dict[str, Any]) -> None:
    """Say which settings of the polar block's parts were given although the other parts leave no use for them."""
    mixer: Any = model.blocks[0].mixer
    if not hasattr(mixer, "without_effect") or not is_parted(block):
        return
    for name in sorted(mixer.without_effect()):
        for part in OLD.get(name, ("",))[0].split():
            given = block.get(part, {})
            shipped = part_settings(part, given.get("kind", ""))
            own = name in shipped and name in given and not str(shipped[name]).startswith("${")
            if own and given[name] != shipped[name]:
                message = f"block.{part}.{name}={given[name]} has no effect with the other settings of this block"
                warnings.warn(message, stacklevel=2)
