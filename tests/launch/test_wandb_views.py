"""The layout of workspace and report names what is really logged, and can be had without an account."""

import argparse
import json
import re
from functools import partial

import pytest
import torch

from polarlm.attention import PolarAttention
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.launch.wandb_views import LAYOUT, add_parser, build_report, build_workspace
from polarlm.model import GPT, GPTConfig
from polarlm.training.loggers import wandb as wandb_module
from polarlm.training.loggers.wandb import HEAT_MAPS, TABLE, condensed

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
    options = parser.parse_args(["wandb", *arguments])
    return options.run(options)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_shows_something_that_is_logged(panel, probe):
    assert panel.x in ("tokens", "flops", "seconds")
    names = LOGGED | set(condensed(probe.scalars()))
    assert set(panel.metrics) <= names
    assert not panel.pattern or len([name for name in names if re.fullmatch(panel.pattern, name)]) >= 2
    charts = {f"{name}/heat_map" for name in HEAT_MAPS} | {f"{name}/by_lag" for name in probe.profiles}
    assert set(panel.media) <= charts | {TABLE, "samples"}
    assert [bool(panel.metrics), bool(panel.media), bool(panel.pattern)].count(True) == 1


def test_the_layout_is_written_without_package_or_login(tmp_path, capsys):
    assert command("workspace", "--out", str(tmp_path / "workspace.json")) == 0
    layout = json.loads((tmp_path / "workspace.json").read_text())
    assert [section["name"] for section in layout["sections"]][:2] == ["Perplexity", "Radial growth"]
    assert layout["x_axis"] == "tokens"
    assert "panels in" in capsys.readouterr().out


def test_without_login_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(wandb_module, "logged_in", lambda: False)
    with pytest.raises(UserError, match=r"(wandb login|pip install).*--out"):
        command("workspace")
    with pytest.raises(UserError, match=r"wandb login|pip install"):
        command("report")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match=r"wandb login"):
        command("sync", "runs")


def test_the_layout_becomes_a_wandb_workspace():
    pytest.importorskip("wandb_workspaces", reason="needs pip install 'polarlm[workspace]'")
    workspace = build_workspace("me", "polarlm", "geometry")
    assert [section.name for section in workspace.sections] == [section.name for section in LAYOUT]
    spec = json.loads(workspace._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    assert spec["settings"]["xAxis"] == "tokens"
    assert spec["runSets"][0]["grouping"] == [{"section": "run", "name": "jobType"}]
    first = spec["panelBankConfig"]["sections"][0]["panels"][0]["config"]
    assert first["metrics"] == ["val/perplexity"] and first["yLogScale"]


def test_the_layout_becomes_a_report_with_the_verdict_first(monkeypatch):
    pytest.importorskip("wandb_workspaces", reason="needs pip install 'polarlm[workspace]'")
    import wandb_workspaces.reports.v2.interface as interface

    # Recent versions ask the server for the project's id, which needs a login; this answers in its place.
    monkeypatch.setattr(interface, "_get_api", lambda: None)
    project = {"project": {"internalId": "UHJvamVjdDox"}}
    monkeypatch.setattr(interface, "execute_graphql", lambda *_: project, raising=False)
    report = build_report("me", "polarlm", "Blocks")
    headings = [block.text for block in report.blocks if type(block).__name__ == "H1"]
    assert headings == ["Verdict", *(section.name for section in LAYOUT)]
    grids = [block for block in report.blocks if type(block).__name__ == "PanelGrid"]
    assert [panel.title for panel in grids[0].panels] == ["verdict", "forest", "results"]
    assert len(grids[1].panels) == len(LAYOUT[0].panels)
    blocks = json.loads(report._to_model().model_dump_json(by_alias=True))["spec"]["blocks"]
    runs = [block["metadata"]["runSets"][0] for block in blocks if block["type"] == "panel-grid"]
    assert [run["name"] for run in runs] == ["Comparisons", *["Runs"] * len(LAYOUT)]
    assert all(run["project"]["name"] == "polarlm" for run in runs)
