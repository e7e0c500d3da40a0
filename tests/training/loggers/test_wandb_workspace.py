"""The workspace's layout names what is really logged, and can be had without an account."""

import argparse
import json
from functools import partial

import pytest
import torch

from polarlm.attention import PolarAttention
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.training.loggers import wandb_mode
from polarlm.training.loggers.wandb_sink import HEAT_MAPS, TABLE, means_over_layers
from polarlm.training.loggers.wandb_workspace import LAYOUT, add_parser, build_workspace

# The rows of metrics.jsonl (Recorder, Validation).
LOGGED = {"train/loss", "val/loss", "val/perplexity", "val/bits_per_byte", "val/accuracy", "tokens_per_second"}
PANELS = [panel for section in LAYOUT for panel in section.panels]


@pytest.fixture(scope="module")
def probe():
    model = GPT(
        GPTConfig(vocab_size=20, context=12, d_model=16, n_layer=2, n_head=2), partial(PolarAttention, radial="own")
    )
    return run_probe(model, torch.randint(0, 20, (2, 12)))


def command(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    options = parser.parse_args(["wandb-workspace", *arguments])
    return options.run(options)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_shows_something_that_is_logged(panel, probe):
    assert panel.x in ("tokens", "flops", "seconds")
    assert set(panel.metrics) <= LOGGED | set(means_over_layers(probe.scalars()))
    charts = {f"{name}/heat_map" for name in HEAT_MAPS} | {f"{name}/by_lag" for name in probe.profiles}
    assert set(panel.media) <= charts | {TABLE}
    assert bool(panel.metrics) != bool(panel.media)


def test_the_layout_is_written_without_package_or_login(tmp_path, capsys):
    assert command("--out", str(tmp_path / "workspace.json")) == 0
    layout = json.loads((tmp_path / "workspace.json").read_text())
    assert [section["name"] for section in layout["sections"]][:2] == ["Perplexity", "Radial growth"]
    assert layout["x_axis"] == "tokens"
    assert "panels in" in capsys.readouterr().out


def test_without_login_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(wandb_mode, "logged_in", lambda: False)
    with pytest.raises(UserError, match=r"(wandb login|pip install).*--out"):
        command()


def test_the_layout_becomes_a_wandb_workspace():
    pytest.importorskip("wandb_workspaces")
    workspace = build_workspace("me", "polarlm", "geometry")
    assert [section.name for section in workspace.sections] == [section.name for section in LAYOUT]
    spec = json.loads(workspace._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    assert spec["settings"]["xAxis"] == "tokens"
    assert spec["runSets"][0]["grouping"] == [{"section": "run", "name": "jobType"}]
    first = spec["panelBankConfig"]["sections"][0]["panels"][0]["config"]
    assert first["metrics"] == ["val/perplexity"] and first["yLogScale"]
