import warnings

import pytest

from polarlm.block_keys import PARTS, POLAR, current_block
from polarlm.errors import UserError
from polarlm.model.build import build_model, warn_about_idle_settings


def config(**block):
    model = dict(context=16, d_model=16, n_layer=1, n_head=2)
    parts = {part: current_block({"_target_": POLAR})[part] for part in PARTS}
    parts |= {"step": {"kind": "tangent", "evidence_clamp": 8.0}, "influence": {"kind": "student"}}
    block = {"_target_": "polarlm.attention.PolarAttention", "_partial_": True, **parts, **block}
    return {"model": model, "block": block, "choices": {"block": "polar"}}


def build_and_warn(config):
    warn_about_idle_settings(build_model(config, 32), config["block"])


def test_a_setting_without_effect_is_named_in_a_warning():
    with pytest.warns(UserWarning, match=r"block.step.evidence_clamp=3.0 has no effect"):
        build_and_warn(config(step={"kind": "tangent", "projection": "per_head", "evidence_clamp": 3.0}))


def test_settings_that_matter_and_defaults_that_do_not_are_silent():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_and_warn(config(step={"kind": "tangent", "projection": "evidence", "evidence_clamp": 3.0}))
        build_and_warn(config(influence={"kind": "exponential", "tau": 3.0}))
    assert [str(warning.message) for warning in caught] == []


def test_a_key_that_the_block_does_not_have_is_a_clear_error():
    with pytest.raises(UserError, match="nuu"):
        build_model(config(nuu=3.0), 32)
