"""Runs that were made before a block had a setting are restored as they were."""

import torch
import yaml

from polarlm.block_keys import flat_block
from polarlm.runs.restore import restore_run
from tests.runs.made_up_run import made_up_run


def test_a_polar_that_did_not_know_forgetting_does_not_forget(tmp_path):
    run = made_up_run(tmp_path / "run", "polar", {"forgetting": "none"})
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    stored["block"] = flat_block(stored["block"])  # as it was stored then
    for name in ("forgetting", "forget_bias"):
        del stored["block"][name]
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(stored))
    again = restore_run(tmp_path / "run", "cpu")
    assert again.model.blocks[0].mixer.forget is None and again.config["block"]["forgetting"] == {"kind": "none"}
    text = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again.model(text), run.model(text))
