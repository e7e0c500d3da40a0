"""`python -m polarlm wandb-workspace`: perplexity and geometry panels in a wandb project, the same for everyone.

The layout is data (`LAYOUT`). With the wandb-workspaces package and a login it is saved to the project; `--out` writes
the workspace as JSON without either, to read, to keep, or to build the panels by hand.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polarlm.errors import UserError

INSTALL = "pip install 'polarlm[workspace]'"
PARAMETERS = ("nu_t", "eta_tk", "eta_tq", "sigma_t0", "mu", "m_inf", "alpha", "beta")


@dataclass(frozen=True)
class Panel:
    """A chart: a line per metric against `x`, or a picture or table logged at every probe."""

    title: str
    metrics: list[str] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    x: str = "tokens"
    log_y: bool = False


@dataclass(frozen=True)
class Section:
    """A titled row of panels."""

    name: str
    panels: list[Panel]


# Quantities of layers and heads are shown as their means.
LAYOUT = [
    Section(
        "Perplexity",
        [
            Panel("Validation perplexity", ["val/perplexity"], log_y=True),
            Panel("Validation bits per byte", ["val/bits_per_byte"]),
            Panel("Training and validation loss", ["train/loss", "val/loss"]),
            Panel("Validation loss against compute", ["val/loss"], x="flops"),
            Panel("Validation loss against time", ["val/loss"], x="seconds"),
            Panel("Validation accuracy", ["val/accuracy"]),
            Panel("Tokens per second", ["tokens_per_second"]),
        ],
    ),
    Section(
        "Radial growth",
        [
            Panel("Residual RMS", ["radial/residual_rms"]),
            Panel("Growth: attention and feed-forward", ["radial/growth_attention", "radial/growth_ffn"]),
            Panel("Predicted growth α⟨v, v̄⟩/r²", ["radial/growth_predicted"]),
            Panel("Measured latent growth", ["radial/growth_latent"]),
            Panel("Prediction's slope and R² on the stream", ["radial/growth_slope", "radial/growth_r2"]),
            Panel("Tangency: latent and stream", ["radial/tangency_latent", "radial/tangency_attention"]),
            Panel("Latent magnitude m", ["radial/magnitude"]),
            Panel("Angular step", ["radial/angular_step_attention", "radial/angular_step_ffn"]),
            Panel("Mean resultant length", ["radial/resultant_length"]),
        ],
    ),
    Section(
        "Precision and attention",
        [
            Panel("Log-evidence", ["precision/log_evidence"]),
            Panel("Share of outliers", ["precision/outlier_share"]),
            Panel("Attention entropy", ["attention/entropy"]),
            Panel("Attention on the first token", ["attention/mass_first"]),
            Panel("Similarity of v̄ with the own value", ["attention/self_similarity"]),
            Panel("Local consensus ε", ["attention/consensus_epsilon"]),
            Panel("Every layer and head", media=["diagnostics/layers_and_heads"]),
            Panel("Log-evidence, layer × head", media=["precision/log_evidence/heat_map"]),
            Panel("Attention entropy, layer × head", media=["attention/entropy/heat_map"]),
            Panel("log κ against lag", media=["precision/log_kappa/by_lag"]),
            Panel("log κ̃ against lag", media=["precision/log_kappa_tilde/by_lag"]),
            Panel("Attention against lag", media=["attention/weight/by_lag"]),
        ],
    ),
    Section("Parameters", [Panel(name, [f"parameters/{name}"]) for name in PARAMETERS]),
]


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    verb = verbs.add_parser("wandb-workspace", help="lay out perplexity and geometry panels in a wandb project")
    verb.add_argument("--project", default="polarlm", help="wandb project (default: polarlm)")
    verb.add_argument("--entity", help="wandb user or team (default: yours)")
    verb.add_argument("--name", default="polarlm geometry", help="the workspace's name")
    verb.add_argument("--out", type=Path, help="write the layout to this JSON file instead; needs no login")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Save the workspace, or write its layout."""
    if options.out:
        options.out.write_text(json.dumps(layout(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{options.out}: {sum(len(s.panels) for s in LAYOUT)} panels in {len(LAYOUT)} sections")
        return 0
    from polarlm.training.loggers.wandb_mode import answers, logged_in, server

    hint = "`python -m polarlm wandb-workspace --out workspace.json` writes the layout without it"
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError:
        raise UserError(f"wandb-workspace needs the wandb-workspaces package: {INSTALL}; {hint}") from None
    if not logged_in():
        raise UserError(f"wandb-workspace needs a wandb login: run `wandb login` or set WANDB_API_KEY; {hint}")
    if not answers(server()):
        raise UserError(f"{server()} does not answer; try again online; {hint}")
    import wandb

    entity = options.entity or wandb.Api().default_entity
    if entity is None:
        raise UserError("your wandb account has no default entity; name one with --entity")
    workspace = build_workspace(entity, options.project, options.name)
    workspace.save()
    print(workspace.url)
    return 0


def layout() -> dict[str, Any]:
    """The workspace as plain data: sections, panels, runs grouped by what varies."""
    return {"x_axis": "tokens", "group_runs_by": "job_type", "sections": [asdict(section) for section in LAYOUT]}


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The layout as a wandb_workspaces.workspaces.Workspace, not saved; runs are grouped by what varies (job type)."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    def chart(panel: Panel) -> Any:
        if panel.media:
            return panels.MediaBrowser(title=panel.title, media_keys=panel.media)
        band = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
        return panels.LinePlot(title=panel.title, x=panel.x, log_y=panel.log_y or None, y=panel.metrics, **band)

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name=section.name, panels=[chart(panel) for panel in section.panels], is_open=index < 2)
            for index, section in enumerate(LAYOUT)
        ],
        settings=workspaces.WorkspaceSettings(x_axis="tokens"),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("JobType")]),
    )
