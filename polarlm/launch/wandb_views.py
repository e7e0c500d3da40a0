"""`polarlm wandb sync | workspace | report`: upload run folders, and lay out the same panels for everyone.

The layout is data (`LAYOUT`). With the wandb-workspaces package and a login it is saved to the project as a workspace
or as a report; `workspace --out` writes it as JSON without either, to read, to keep, or to build the panels by hand.
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
    pattern: str = ""  # a regular expression of metrics: a line per layer
    x: str = "tokens"
    log_y: bool = False


@dataclass(frozen=True)
class Section:
    """A titled row of panels."""

    name: str
    panels: list[Panel]


# Quantities of layers and heads are shown as their means, or by a pattern layer by layer.
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
            Panel("Samples", media=["samples"]),
        ],
    ),
    Section(
        "Radial growth",
        [
            Panel("Residual RMS by layer", pattern=r"radial/residual_rms/layer_\d+"),
            Panel("Growth of attention by layer", pattern=r"radial/growth_attention/layer_\d+"),
            Panel("Latent growth by layer", pattern=r"radial/growth_latent/layer_\d+"),
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
            Panel("Log-evidence by layer", pattern=r"precision/log_evidence/layer_\d+"),
            Panel("Share of outliers by layer", pattern=r"precision/outlier_share/layer_\d+"),
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
    verb = verbs.add_parser("wandb", help="upload run folders to wandb, create workspaces and reports")
    actions = verb.add_subparsers(title="actions", metavar="action", required=True)
    action = actions.add_parser("sync", help="upload run folders: steps that are not there yet, from metrics.jsonl")
    action.add_argument("runs", nargs="+", help="run folders, patterns, or folders that contain runs")
    action.add_argument("--offline", action="store_true", help="write <run>/wandb/offline-run-* instead")
    action.set_defaults(run=run_sync)
    add_project(action)
    action = actions.add_parser("workspace", help="perplexity and geometry panels as a workspace of the project")
    action.add_argument("--name", default="polarlm geometry", help="the workspace's name")
    action.add_argument("--out", type=Path, help="write the layout to this JSON file instead; needs no login")
    action.set_defaults(run=run_workspace)
    add_project(action)
    action = actions.add_parser("report", help="the same panels as a report, to be completed by hand")
    action.add_argument("--title", default="polarlm: a comparison of blocks", help="the report's title")
    action.set_defaults(run=run_report)
    add_project(action)


def add_project(parser: Any) -> None:
    """The options that say where in wandb."""
    parser.add_argument("--project", default="polarlm", help="wandb project (default: polarlm)")
    parser.add_argument("--entity", help="wandb user or team (default: yours)")


def run_sync(options: argparse.Namespace) -> int:
    """Replay every run folder into wandb."""
    from polarlm.runs.files import read_config
    from polarlm.runs.reading import find_run_folders
    from polarlm.training.loggers.wandb import choose_mode, sync

    mode, note = choose_mode("offline" if options.offline else "online")
    if mode == "disabled" or note:
        raise UserError(note or "wandb is disabled (WANDB_MODE=disabled); unset it to upload")
    for folder in find_run_folders(options.runs):
        config = read_config(folder / "config.yaml")
        init = {"project": options.project, "entity": options.entity, "name": folder.name, "config": config}
        init |= {"group": config.get("group"), "job_type": config["choices"]["block"]}
        seen = sync(folder, init, mode)
        if seen is None:
            raise UserError(f"{folder} could not be uploaded; it was written to {folder}/wandb, try again later")
        print(f"{folder}: {seen}")
    return 0


def run_workspace(options: argparse.Namespace) -> int:
    """Save the workspace, or write its layout."""
    if options.out:
        options.out.write_text(json.dumps(layout(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{options.out}: {sum(len(s.panels) for s in LAYOUT)} panels in {len(LAYOUT)} sections")
        return 0
    hint = "; `polarlm wandb workspace --out workspace.json` writes the layout without it"
    workspace = build_workspace(require_entity(options, hint), options.project, options.name)
    workspace.save()
    print(workspace.url)
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Save the report."""
    report = build_report(require_entity(options), options.project, options.title)
    report.save()
    print(report.url)
    return 0


def require_entity(options: argparse.Namespace, hint: str = "") -> str:
    """Whose project it is, once the package, a login and the server are there."""
    from polarlm.training.loggers.wandb import answers, logged_in, server

    try:
        import wandb_workspaces  # noqa: F401
    except ImportError:
        raise UserError(f"this needs the wandb-workspaces package: {INSTALL}{hint}") from None
    if not logged_in():
        raise UserError(f"this needs a wandb login: run `wandb login` or set WANDB_API_KEY{hint}")
    if not answers(server()):
        raise UserError(f"{server()} does not answer; try again online{hint}")
    import wandb

    entity = options.entity or wandb.Api().default_entity
    if entity is None:
        raise UserError("your wandb account has no default entity; name one with --entity")
    return str(entity)


def layout() -> dict[str, Any]:
    """The workspace as plain data: sections, panels, runs grouped by what varies."""
    return {"x_axis": "tokens", "group_runs_by": "job_type", "sections": [asdict(section) for section in LAYOUT]}


def chart(panel: Panel) -> Any:
    """A panel as wandb_workspaces draws it: means and deviations over the seeds of a setting."""
    import wandb_workspaces.reports.v2 as panels

    if panel.media:
        return panels.MediaBrowser(title=panel.title, media_keys=panel.media)
    return panels.LinePlot(
        title=panel.title,
        x=panel.x,
        y=list(panel.metrics),
        metric_regex=panel.pattern or None,
        log_y=panel.log_y or None,
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
    )


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The layout as a wandb_workspaces.workspaces.Workspace, not saved; runs are grouped by what varies (job type)."""
    import wandb_workspaces.workspaces as workspaces

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


def build_report(entity: str, project: str, title: str) -> Any:
    """The layout as a wandb_workspaces.reports.v2.Report, not saved: the verdict first, then a grid per section."""
    import wandb_workspaces.reports.v2 as reports

    runs = reports.Runset(entity=entity, project=project, name="Runs", groupby=["JobType"])
    verdicts = reports.Runset(entity=entity, project=project, name="Comparisons", query="comparison")
    pushed: list[Any] = [
        reports.MediaBrowser(title=name, media_keys=[name]) for name in ("verdict", "forest", "results")
    ]
    blocks: list[Any] = [
        reports.P("What was compared, and why. Replace this paragraph."),
        reports.H1("Verdict"),
        reports.P("Pushed by `polarlm compare runs/* --wandb`."),
        reports.PanelGrid(runsets=[verdicts], panels=pushed),
    ]
    for section in LAYOUT:
        grid = reports.PanelGrid(runsets=[runs], panels=[chart(panel) for panel in section.panels])
        blocks += [reports.H1(section.name), grid]
    return reports.Report(project=project, entity=entity, title=title, blocks=blocks)
