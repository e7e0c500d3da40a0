"""The ends of every scalar's range train in fp32, values beyond are refused, and a block that starts blind is named."""

import math
import warnings
from dataclasses import fields

import pytest
import torch

from polarlm.block_keys import flat_block
from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.launch.schema import BlockSettings
from polarlm.model.build import build_model, warn_about_blind_blocks

SMALL = ["model.d_model=16", "model.n_layer=2", "model.n_head=2", "model.context=32"]
RANGED = {f.name: f.metadata for f in fields(BlockSettings) if "at_most" in f.metadata}


def config_of(*settings: str) -> dict:
    (job,) = plan_jobs(config_loader(), "train", [*SMALL, *settings], multirun=False).jobs
    if job.error:
        raise job.error
    return job.config


@pytest.mark.parametrize(
    "block", ["polar", "polar_paper", "polar_literal", "polar_uncertainty", "rfa", "rfa_published", "xpos", "standard"]
)
def test_the_ends_of_every_range_give_finite_losses_and_gradients(block):
    layers = 2 if block == "polar_uncertainty" else 1  # one layer hands its precision to the next
    config = config_of(f"block={block}", f"model.n_layer={layers}")
    tokens = torch.arange(32).reshape(2, 16) % 50
    flat = flat_block(config["block"])  # every part's numbers by their old names
    for name in RANGED.keys() & flat.keys():
        for end in ("at_least", "at_most"):
            options = {**flat, name: float(RANGED[name][end])}
            if name == "qk_gain":
                options["qk_norm"] = True
            torch.manual_seed(0)
            try:
                model = build_model({**config, "block": options}, 50)
            except UserError:  # both noises 0, for example
                continue
            loss = model.loss(tokens, tokens)
            loss.backward()
            wrong = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            assert math.isfinite(loss.detach()) and not wrong, (name, end)


@pytest.mark.parametrize("value", ["1e9", "1e30", "1e300", "-1e30"])
@pytest.mark.parametrize("name", ["eta_tq", "sigma_t0", "m_inf", "nu_t", "mu", "radius", "forget_bias", "tau"])
def test_a_number_that_fp32_can_not_hold_is_refused(name, value):
    kernel = ["block/influence=exponential"] if name == "tau" else []
    typed = "nu" if name == "nu_t" else name
    with pytest.raises(UserError, match=rf"block[.\w]*\.{typed}=.*≤"):
        config_of("block=polar", *kernel, f"block.{name}={value}")
    config = config_of("block=polar", *kernel)
    with pytest.raises(UserError, match=f"block.{name}.*at most"):
        build_model({**config, "block": flat_block(config["block"]) | {name: float(value)}}, 50)


@pytest.mark.parametrize(
    "settings", [("block=polar", "block.forget_bias=-100"), ("block=rfa", "block.sigma_process=1e6")]
)
def test_a_fresh_block_that_attends_to_nothing_but_itself_is_warned_about(settings):
    with pytest.warns(UserWarning, match="attends only to itself"):
        warn_about_blind_blocks(build_model(config_of(*settings), 50))


@pytest.mark.parametrize("block", ["polar", "polar_literal", "rfa", "standard", "alibi", "fox"])
def test_blocks_that_see_their_past_are_not_warned_about(block):
    model = build_model(config_of(f"block={block}", "model.zero_init=true"), 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_blind_blocks(model)
    assert model.training
