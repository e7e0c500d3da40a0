"""Every yaml in configs/block is a block; adding one is enough to put it under the contract."""

import copy
import functools
import os
from collections.abc import Callable

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from polarlm.block_keys import PARTS, VARIANTS, expanded, part_choices
from polarlm.locations import CONFIGS
from polarlm.model import GPT, GPTConfig

FILES = sorted(path.stem for path in (CONFIGS / "block").glob("*.yaml"))
# `polar` with every choice of every part that it does not have anyway, and the rungs of the ladder.
CHOSEN = {
    f"polar_{part}_{choice}": ["block=polar", f"block/{part}={choice}"]
    for part in PARTS
    for choice in part_choices(part)
    if choice not in ("sphere", "rotary", "magnitude", "student", "content", "mean", "tangent", "free")
    and (part, choice) != ("radial", "none")
    and (part, choice) not in [("transport", "unitary"), ("aggregate", "gate"), ("precision", "carried")]  # VARIANTS
}
BLOCKS = sorted([*FILES, *VARIANTS, *CHOSEN])
# Blocks with Python of their own; the others are the same code with other switches.
CLASSES = [name for name in FILES if "_target_" in (CONFIGS / "block" / f"{name}.yaml").read_text()]
# And variants whose switch is Python that no other block runs: these are compiled too.
COMPILED = [*CLASSES, "polar_transport", "polar_consensus", "polar_uncertainty", "polar_irls", "geonorm"]
if "POLARLM_NIGHTLY" in os.environ:  # a factor more in standard's code
    COMPILED += ["lns", "gated"]
VOCAB = 61


@pytest.fixture(params=BLOCKS)
def block(request: pytest.FixtureRequest) -> str:
    """Name of a block."""
    return request.param


@functools.cache
def mixer_of(block: str) -> Callable:
    """The mixer factory that Hydra makes of a block's yaml."""
    return instantiate(block_section(block), _convert_="all")


def overrides_of(block: str) -> list[str]:
    """What makes this block on the command line."""
    return CHOSEN.get(block) or expanded([f"block={block}"])


def frame_of(block: str) -> dict[str, str]:
    """The residual frame that a block's yaml asks for, as an argument of GPTConfig."""
    frame = _section(block).get("frame")
    return {"frame": frame} if frame else {}


def block_section(block: str) -> dict:
    """A block's yaml as its mixer takes it: without the frame, which is the model's."""
    return {key: value for key, value in _section(block).items() if key != "frame"}


@functools.cache
def _section(block: str) -> dict:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides_of(block)).block, resolve=True)


@pytest.fixture
def mixer(block: str) -> Callable:
    """The block's mixer factory."""
    return mixer_of(block)


@pytest.fixture
def build(mixer: Callable, block: str) -> Callable[..., GPT]:
    """Makes a small model of the block, stirred out of its initial symmetry unless fresh=True."""

    def make(fresh: bool = False, **changes) -> GPT:
        size = (
            {"vocab_size": VOCAB, "context": 32, "d_model": 32, "n_layer": 2, "n_head": 4} | frame_of(block) | changes
        )
        model = fresh_model(mixer, size)
        return model if fresh else stir(model)

    return make


_fresh: dict[tuple, tuple[GPT, torch.Tensor]] = {}


def fresh_model(mixer: Callable, size: dict) -> GPT:
    """What GPT(...) makes with the random numbers as they stand; made once, since every test starts from one seed."""
    if size["d_model"] > 32:  # of one test: kept, they would fill a gigabyte
        return GPT(GPTConfig(**size), mixer)
    key = (mixer, *sorted(size.items()), torch.get_rng_state().numpy().tobytes())
    if key not in _fresh:
        _fresh[key] = GPT(GPTConfig(**size), mixer), torch.get_rng_state()
    model, after = _fresh[key]
    torch.set_rng_state(after)
    return copy.deepcopy(model)


def stir(model: torch.nn.Module) -> torch.nn.Module:
    """Make scores, gains and noises differ between heads, so that a mistake cannot hide behind symmetry."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embedding" in name or "head" in name:
                parameter.mul_(3.0)
            elif not parameter.any():  # a matrix that starts at zero would keep its part of the block out of the test
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model
