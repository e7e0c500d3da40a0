"""Weights & Biases as a sink: one run per training job, `tokens` as the x-axis, geometry as interactive charts.

This module is imported only for logger=wandb; what it imports is paid before training starts, not at a probe.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from polarlm.diagnostics import Histogram, Probe
from polarlm.evaluation.metrics import METRICS, SPLITS
from polarlm.runs.environment import environment
from polarlm.runs.files import read_json, write_json
from polarlm.training.loggers.wandb_mode import choose_mode

INIT_TIMEOUT = 15  # seconds; wandb's own 90 would hold up a run whose network is bad
FINISH_TIMEOUT = 60  # seconds for the last upload; what is left stays on disk for `wandb sync`
BEST = {"lower": "min", "higher": "max"}  # what wandb's summary keeps of a metric
# Pictures at every probe; every number of every layer and head is in the table beside them.
HEAT_MAPS = (
    "precision/log_evidence",
    "precision/outlier_share",
    "attention/entropy",
    "attention/mass_first",
    "attention/self_similarity",
    "radial/resultant_length",
)
TABLE = "diagnostics/layers_and_heads"
_PLACE = re.compile(r"/layer_\d+(/head_\d+)?$")


def means_over_layers(metrics: dict[str, Any]) -> dict[str, Any]:
    """A row with one name per quantity: the mean over its layers and heads, what has neither as it is.

    metrics.jsonl has a name for every layer and head; a workspace with thousands of charts would show nothing.
    """
    scalars: dict[str, Any] = {}
    parts: dict[str, list[float]] = {}
    for name, value in metrics.items():
        quantity = _PLACE.sub("", name)
        if value is None:
            continue
        if quantity == name:
            scalars[name] = value
        else:
            parts.setdefault(quantity, []).append(value)
    return scalars | {name: sum(values) / len(values) for name, values in parts.items()}


class WandbSink(WandbLogger):
    """A started wandb run that rows and probes are copied to; metrics.jsonl remains the truth."""

    def __init__(self, run: Any, folder: Path, *, offline: bool) -> None:
        super().__init__(experiment=run, save_dir=folder, offline=offline)
        self.offline = offline

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The whole configuration was given when the run was started."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        """Copy a row; its own `tokens` and `step` are the axes, so wandb's step counter is left alone."""
        self.experiment.log(means_over_layers(metrics))

    @rank_zero_only
    def log_probe(self, probe: Probe, *, step: int, tokens: int) -> None:
        """One table of all layers and heads, histograms and heat maps by layer, lag profiles of one probe."""
        charts: dict[str, Any] = {"tokens": tokens, "step": step, TABLE: wandb.Table(COLUMNS, layer_table(probe))}
        for name, layers in probe.histograms.items():
            charts[f"{name}/histogram"] = wandb.Plotly(go.Figure(histograms(name, layers)))
        for name in HEAT_MAPS:
            if name in probe.values:
                charts[f"{name}/heat_map"] = wandb.Plotly(go.Figure(heat_map(name, probe.values[name])))
        for name, profile in probe.profiles.items():
            charts[f"{name}/by_lag"] = wandb.Plotly(go.Figure(lag_profile(name, profile)))
        self.experiment.log(charts)

    def finish(self, status: str, summary: dict[str, float | str]) -> None:
        """Close the run: its summary, and an exit code that shows failures in the run list."""
        self.experiment.summary.update({**summary, "status": status})
        self.experiment.finish(exit_code=0 if status == "finished" else 1)


def start_wandb(
    config: dict[str, Any], folder: Path, *, group: str | None, tags: list[str], varied: str
) -> WandbSink | None:
    """Start (or continue) this run folder's wandb run; None when wandb is disabled.

    `varied` says what this run is in its sweep; it is the job type, by which a workspace groups the seeds of a setting.
    """
    options = config["logger"]
    mode, note = choose_mode(options["mode"])
    if mode == "disabled":
        return None
    remembered = folder / "wandb" / "run.json"
    known = read_json(remembered) or {}
    env = read_json(folder / "environment.json") or environment()
    code = {"commit": env["git_commit"], "dirty": env["git_dirty"], "version": env["versions"]["polarlm"]}
    arguments: dict[str, Any] = {
        "project": options["project"],
        "entity": options.get("entity"),
        "dir": str(folder),
        "id": known.get("id") or secrets.token_hex(4),
        "name": folder.name,
        "group": group,
        "job_type": varied,
        "tags": tags,
        "config": {**config, "code": code},
        "reinit": "finish_previous",
    }
    if known:
        arguments["resume"] = "allow"
    settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
    if note:
        print(note, file=sys.stderr)
    try:
        run = wandb.init(mode=mode, settings=settings, **arguments)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        mode = "offline"
        print(f"wandb: {' '.join(str(error).split())[:200]}; this run is logged offline", file=sys.stderr)
        arguments["id"] = secrets.token_hex(4)  # wandb still holds the id of the run that did not start
        run = wandb.init(mode=mode, settings=settings, **arguments)
    write_json(remembered, {"id": run.id, "project": options["project"], "mode": mode})
    define_axes(run)
    return WandbSink(run, folder, offline=mode == "offline")


def define_axes(run: Any) -> None:
    """Everything against tokens; the summary of a metric is its best value, of everything else the last one."""
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    for split in SPLITS:
        for metric in METRICS:
            run.define_metric(f"{split}/{metric.name}", step_metric="tokens", summary=BEST[metric.better])


COLUMNS: list[str | int] = ["quantity", "layer", "head", "value"]


def layer_table(probe: Probe) -> list[list[Any]]:
    """(quantity, layer, head, value) of everything a probe found; what has no head or no layer has None there."""
    rows: list[list[Any]] = []
    for name, value in probe.values.items():
        for layer, entry in enumerate(value) if isinstance(value, list) else [(None, value)]:
            for head, number in enumerate(entry) if isinstance(entry, list) else [(None, entry)]:
                rows.append([name, layer, head, number])
    return rows


def histograms(name: str, layers: Sequence[Histogram]) -> dict[str, Any]:
    """One line per layer over the middle of its bins, as the data of a Plotly figure: shares, not counts."""
    traces = []
    for layer, histogram in enumerate(layers):
        total = max(1, sum(histogram.counts))
        middles = [(a + b) / 2 for a, b in itertools.pairwise(histogram.edges)]
        line = {"type": "scatter", "mode": "lines", "name": f"layer {layer}"}
        traces.append({**line, "x": middles, "y": [count / total for count in histogram.counts]})
    return {"data": traces, "layout": {"title": {"text": name}, "yaxis": {"title": {"text": "share"}}}}


def heat_map(name: str, rows: list[list[float | None]]) -> dict[str, Any]:
    """A layer × head heat map as the data of a Plotly figure."""
    trace = {
        "type": "heatmap",
        "z": rows,
        "colorscale": "Viridis",
        "hovertemplate": "layer %{y}, head %{x}: %{z:.4g}<extra></extra>",
    }
    layout = {"title": {"text": name}, "xaxis": {"title": {"text": "head"}, "dtick": 1}}
    layout["yaxis"] = {"title": {"text": "layer"}, "dtick": 1}
    return {"data": [trace], "layout": layout}


def lag_profile(name: str, profile: dict[str, Any]) -> dict[str, Any]:
    """One line per head against lag, as the data of a Plotly figure; one legend entry per layer toggles its heads."""
    traces = []
    for layer, heads in enumerate(profile["y"]):
        # A null between two heads lifts the pen: one trace per layer is lighter than one per head.
        points = [(x, y, f"head {head}") for head, line in enumerate(heads) for x, y in zip(profile["x"], line)]
        width = len(profile["x"])
        for head in range(len(heads) - 1, 0, -1):
            points.insert(head * width, (None, None, ""))
        x, y, text = zip(*points)
        template = f"layer {layer}, %{{text}}: %{{y:.4g}} at lag %{{x}}<extra></extra>"
        line = {"type": "scatter", "mode": "lines", "name": f"layer {layer}", "hovertemplate": template}
        traces.append({**line, "x": x, "y": y, "text": text})
    layout = {"title": {"text": name}, "xaxis": {"title": {"text": profile["xlabel"]}}}
    return {"data": traces, "layout": layout}
