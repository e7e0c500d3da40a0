"""Weights & Biases: one run per run folder, `tokens` as the x-axis, geometry as lines, histograms and charts.

A wandb run is a replay of metrics.jsonl, diagnostics/probe.jsonl and diagnostics/samples.jsonl under the run's own
steps: live while it trains, again from the files when it resumes, and by `polarlm wandb sync` at any later time. wandb
keeps the first row of a step and drops later ones, so a killed and resumed run is one curve without gaps or repeats.
(Offline, wandb can't resume: it would write a second folder with the same id, and syncing both can erase the first
part, wandb issues 4482 and 5865. Here the new folder holds everything and replaces the old one.)
"""

from __future__ import annotations

import configparser
import json
import netrc
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger as LightningWandbLogger
from lightning.pytorch.utilities import rank_zero_only

from polarlm import network
from polarlm.errors import UserError
from polarlm.evaluation.metrics import METRICS, SPLITS
from polarlm.printing import say_once
from polarlm.runs.files import json_lines, read_json, write_json
from polarlm.runs.folder import environment
from polarlm.training.loggers import final_numbers, own_step
from polarlm.training.recorder import METRICS as ROWS
from polarlm.training.recorder import PROBES, RECORDS

Mode = Literal["online", "offline", "disabled"]
MODES = ("auto", "online", "offline")
ARTIFACTS = {
    "none": (),
    "weights": ("model.safetensors",),
    "checkpoints": ("model.safetensors", "last.ckpt", "best.ckpt"),
}
SERVER = "https://api.wandb.ai"
INIT_TIMEOUT = 15  # seconds; wandb's own 90 would hold up a run whose network is bad
FINISH_TIMEOUT = 60  # seconds for the last upload; what is left stays on disk for `polarlm wandb sync`
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
# A line per layer (heads averaged); of everything else one line, the mean over layers and heads.
PER_LAYER = (
    "radial/residual_rms",
    "radial/growth_attention",
    "radial/growth_latent",
    "precision/log_evidence",
    "precision/outlier_share",
)
TABLE = "diagnostics/layers_and_heads"
COLUMNS: list[str | int] = ["quantity", "layer", "head", "value"]
_PLACE = re.compile(r"/layer_\d+(/head_\d+)?$")
_HEAD = re.compile(r"/head_\d+$")


# -- online or offline: decided in seconds, without a prompt, before wandb itself would wait for minutes ---------------


def choose_mode(wanted: str) -> tuple[Mode, str | None]:
    """(online | offline | disabled, a sentence when the user gets less than was asked for)."""
    if wanted not in MODES:
        raise UserError(f"logger.wandb.mode={wanted!r} is unknown; choose one of {', '.join(MODES)}")
    variable = os.environ.get("WANDB_MODE", "").lower()
    if variable in ("disabled", "offline", "dryrun"):
        return ("disabled" if variable == "disabled" else "offline"), None
    if wanted == "offline":
        return "offline", None
    if not logged_in():
        if wanted == "online" or variable == "online":
            raise UserError(
                "logger.wandb.mode=online needs a wandb login, and there is none; run `wandb login` or set "
                "WANDB_API_KEY, or choose logger.wandb.mode=offline"
            )
        return "offline", None
    if not answers(server()):
        return "offline", f"wandb: {server()} does not answer; this run is logged offline"
    return "online", None


def server() -> str:
    """The server wandb talks to: WANDB_BASE_URL, else what `wandb login --host` stored, else the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    settings = configparser.ConfigParser()
    try:
        folder = os.path.expanduser(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb"))
        settings.read(Path(folder) / "settings")
        return settings.get("default", "base_url", fallback=SERVER)
    except configparser.Error:
        return SERVER


def logged_in() -> bool:
    """Whether wandb would find credentials for its server without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).netloc
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and (login := netrc.netrc(os.path.expanduser(path)).authenticators(host)):
                return bool(login[2])
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def answers(url: str) -> bool:
    """Whether wandb's server at `url` answers."""
    question = json.dumps({"query": "query { serverInfo { cliVersionInfo } }"}).encode()
    return network.reachable(f"{url.rstrip('/')}/graphql", question)


# -- the logger --------------------------------------------------------------------------------------------------------


def wandb_logger(*, mode: str = "auto", **options: Any) -> WandbLogger | None:
    """The target of configs/logger/wandb.yaml; None when wandb is disabled (WANDB_MODE=disabled)."""
    chosen, note = choose_mode(mode)
    if note:
        print(note, file=sys.stderr)
    return None if chosen == "disabled" else WandbLogger(mode=chosen, wanted=mode, **options)


def check_options(options: dict[str, Any]) -> None:
    """Refuse what could not be started, before a run folder is made."""
    choose_mode(options["mode"])
    if options.get("artifacts", "none") not in ARTIFACTS:
        raise UserError(
            f"logger.wandb.artifacts={options['artifacts']!r} is unknown; choose one of {', '.join(ARTIFACTS)}"
        )


wandb_logger.check = check_options  # type: ignore[attr-defined]


class WandbLogger(LightningWandbLogger):
    """Lightning's WandbLogger, started at once under the run folder's own id, with rows under their own steps."""

    def __init__(
        self, *, save_dir: str, mode: Mode, wanted: str = "auto", project: str = "polarlm", entity: str | None = None,
        artifacts: str = "none", config: dict[str, Any] | None = None, **init: Any,
    ) -> None:  # fmt: skip
        self.folder, self.mode, self.wanted, self.artifacts = Path(save_dir), mode, wanted, ARTIFACTS[artifacts]
        env = read_json(self.folder / "environment.json") or environment()
        code = {"commit": env["git_commit"], "dirty": env["git_dirty"], "version": env["versions"]["polarlm"]}
        self.init = {"project": project, "entity": entity, "config": {**(config or {}), "code": code}, **init}
        self.samples: list[list[Any]] = []
        self._newest = -1  # step that this process logged
        super().__init__(experiment=self._start(), save_dir=save_dir, offline=self.mode == "offline")

    def _start(self) -> Any:
        """wandb.init under the id of this folder; offline if the server refuses."""
        import wandb

        remembered = self.folder / "wandb" / "run.json"
        known = read_json(remembered) or {}
        self.init["id"] = known.get("id") or secrets.token_hex(4)
        arguments = {**self.init, "dir": str(self.folder), "reinit": "finish_previous"}
        settings = wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
        if self.mode == "online":
            try:
                run = wandb.init(mode="online", settings=settings, resume="allow", **arguments)
            except wandb.errors.Error as error:
                print(f"wandb: {' '.join(str(error).split())[:200]}; this run is logged offline", file=sys.stderr)
                self.mode = "offline"
                # wandb still holds the id of the run that did not start.
                self.init["id"] = arguments["id"] = secrets.token_hex(4)
        if self.mode == "offline":
            for old in (self.folder / "wandb").glob("offline-run-*"):
                shutil.rmtree(old, ignore_errors=True)  # the new one gets everything: replay
            run = wandb.init(mode="offline", settings=settings, **arguments)
        url = run.url if self.mode == "online" else None
        write_json(remembered, {"id": run.id, "project": self.init["project"], "mode": self.mode, "url": url})
        define_axes(run)
        return run

    @property
    def url(self) -> str | None:
        """Where the run can be seen; None offline, where wandb would only warn."""
        return self.experiment.url if self.mode == "online" else None

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The whole configuration was given when the run was started."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        """Copy a row, unless this step is already there."""
        self._log(condensed(metrics), own_step(metrics, step))

    @rank_zero_only
    def log_probe(self, row: dict[str, Any]) -> None:
        """A line of probe.jsonl: one table of all layers and heads, histograms by layer, heat maps, lag profiles."""
        self._log({"tokens": row["tokens"], "step": row["step"], **probe_charts(row)}, row["step"])

    @rank_zero_only
    def log_samples(self, row: dict[str, Any]) -> None:
        """A line of samples.jsonl, in one table of all samples so far."""
        import wandb

        self.samples.append([row["step"], row["tokens"], row["prompt"], row["text"]])
        table = wandb.Table(["step", "tokens", "prompt", "text"], self.samples)
        self._log({"tokens": row["tokens"], "step": row["step"], "samples": table}, row["step"])

    def _log(self, values: dict[str, Any], step: int | None) -> None:
        if step is None or step >= self.experiment.step:  # else it is there
            self.experiment.log(values, step=step)
            self._newest = max(self._newest, step or 0)

    def replay(self) -> None:
        """Log what the run folder holds and wandb does not."""
        recorded = {name: json_lines(self.folder / name) for name in RECORDS}
        newest = max((row["step"] for rows in recorded.values() for row in rows), default=-1)
        if self._newest > newest:  # the run went back to an earlier step: what was logged since then is not its history
            self.experiment.finish()
            if self.mode == "online":
                (self.folder / "wandb" / "run.json").unlink(missing_ok=True)
            self._experiment, self._newest, self.samples = self._start(), -1, []
        for _, name, row in sorted(
            ((row["step"], name, row) for name, rows in recorded.items() for row in rows), key=lambda entry: entry[:2]
        ):
            if name == ROWS:
                self.log_metrics(row, row["step"])
            else:
                (self.log_probe if name == PROBES else self.log_samples)(row)

    def finish(self, status: str, summary: dict[str, float | str]) -> None:
        """Close the run: its summary, its artifacts, and an exit code that shows failures in the run list."""
        import wandb

        run = self.experiment
        run.log({}, commit=True)  # the last row, whose numbers would otherwise come after the summary's
        run.summary.update({**summary, "status": status})
        files = [self.folder / "checkpoints" / name for name in self.artifacts]
        if status == "finished" and files:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", self.folder.name), type="model")
            for file in files:
                if file.exists():
                    artifact.add_file(str(file), policy="immutable")
            run.log_artifact(artifact)
        run.finish(exit_code=0 if status == "finished" else 1)
        if self.mode == "offline" and not self._upload(status):
            say_once(f"wandb: logged offline; to upload: polarlm wandb sync {self.folder.parent}/*")

    def _upload(self, status: str) -> bool:
        """Upload a run that began without the server, if it is there now."""
        if self.wanted == "offline" or os.environ.get("WANDB_MODE") or not logged_in():
            return False
        network.reachable.cache_clear()
        return status == "finished" and answers(server()) and sync(self.folder, self.init, "online") is not None


def sync(folder: Path, init: dict[str, Any], mode: Mode) -> str | None:
    """Replay a run folder into wandb and close it with its summary; returns its address, or the offline folder."""
    logger = WandbLogger(save_dir=str(folder), mode=mode, **{k: v for k, v in init.items() if k != "id"})
    if logger.mode != mode:
        return None
    url, place = logger.url, Path(logger.experiment.dir).parent
    logger.replay()
    summary = read_json(folder / "summary.json") or {}
    logger.wanted = "offline"  # nothing more to upload
    logger.finish(summary.get("status", "unknown"), final_numbers(summary))
    if url:
        write_json(folder / "summary.json", {**summary, "wandb": url})
    return url or str(place)


def define_axes(run: Any) -> None:
    """Everything against tokens; the summary of a metric is its best value, of everything else the last one."""
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    for split in SPLITS:
        for metric in METRICS:
            run.define_metric(f"{split}/{metric.name}", step_metric="tokens", summary=BEST[metric.better])


# -- what a row and a probe become -------------------------------------------------------------------------------------


def condensed(metrics: dict[str, Any]) -> dict[str, Any]:
    """A row with the mean over layers and heads of every quantity, and a line per layer of those in PER_LAYER.

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
            continue
        parts.setdefault(quantity, []).append(value)
        if quantity in PER_LAYER:
            parts.setdefault(_HEAD.sub("", name), []).append(value)
    return scalars | {name: sum(values) / len(values) for name, values in parts.items()}


def probe_charts(row: dict[str, Any]) -> dict[str, Any]:
    """The charts of one line of probe.jsonl."""
    import plotly.graph_objects as go
    import wandb

    charts: dict[str, Any] = {TABLE: wandb.Table(COLUMNS, layer_table(row["values"]))}
    for name, layers in (row.get("histograms") or {}).items():
        for layer, histogram in enumerate(layers):
            native = wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))
            charts[f"{name}/histogram/layer_{layer:02d}"] = native
    for name in HEAT_MAPS:
        if name in row["values"]:
            charts[f"{name}/heat_map"] = wandb.Plotly(go.Figure(heat_map(name, row["values"][name])))
    for name, profile in row["profiles"].items():
        charts[f"{name}/by_lag"] = wandb.Plotly(go.Figure(lag_profile(name, profile)))
    return charts


def layer_table(values: dict[str, Any]) -> list[list[Any]]:
    """(quantity, layer, head, value) of everything a probe found; what has no head or no layer has None there."""
    rows: list[list[Any]] = []
    for name, value in values.items():
        for layer, entry in enumerate(value) if isinstance(value, list) else [(None, value)]:
            for head, number in enumerate(entry) if isinstance(entry, list) else [(None, entry)]:
                rows.append([name, layer, head, number])
    return rows


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


# -- the comparison of a sweep -----------------------------------------------------------------------------------------


def log_comparison(
    *, name: str, project: str, folder: Path, text: str, table: Any, forest: list[dict[str, Any]]
) -> str:
    """Push a sweep's verdict, its table and its forest plot as one wandb run; returns its address or offline folder."""
    import plotly.graph_objects as go
    import wandb

    mode, note = choose_mode("auto")
    if mode == "disabled":
        raise UserError("compare --wandb: wandb is disabled (WANDB_MODE=disabled); unset it")
    if note:
        print(note, file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT)
    run = wandb.init(
        project=project, dir=str(folder), name=name, group=name, job_type="comparison", mode=mode,
        settings=settings, reinit="finish_previous",
    )  # fmt: skip
    logged: dict[str, Any] = {"results": wandb.Table(list(table.columns), table.rows)}
    logged["verdict"] = wandb.Html(f"<pre>{_escaped(text)}</pre>")
    if forest:
        logged["forest"] = wandb.Plotly(go.Figure(forest_plot(forest)))
    run.log(logged)
    run.summary["verdict"] = text.splitlines()[0]
    seen = str(run.url) if mode == "online" else str(Path(run.dir).parent)
    run.finish()
    return seen


def forest_plot(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences to the baseline with their 95 % intervals, as the data of a Plotly figure."""
    shown = [row for row in rows if row["low"] is not None]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [row["mean"] for row in shown],
        "y": [row["label"] for row in shown],
        "text": [row["outcome"] for row in shown],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [row["high"] - row["mean"] for row in shown],
            "arrayminus": [row["mean"] - row["low"] for row in shown],
        },
    }
    layout = {"title": {"text": "Difference to the baseline, 95 % interval"}, "xaxis": {"zeroline": True}}
    return {"data": [trace], "layout": layout}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
