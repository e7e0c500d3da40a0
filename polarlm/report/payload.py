"""Everything the page draws, as one JSON value: thinned curves per run, probes averaged over the seeds of a group."""

import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from polarlm.evaluation.metrics import METRICS
from polarlm.report.captions import validation_caption
from polarlm.report.quantities import Quantity, quantity_named
from polarlm.report.records import curve_panels
from polarlm.report.verdict_data import verdict_data
from polarlm.runs.measurements import StoredProbe
from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group
from polarlm.verdict.judgement import UNEQUAL, Judgement
from polarlm.verdict.sentences import reference_losses

# Points of all training curves together: 30 runs get 500 each, 200 runs 300 each; the page stays a few MB.
POINT_BUDGET, MIN_POINTS, MAX_POINTS = 60_000, 120, 500
# Numbers that the trajectories may hold before heads are averaged away.
HISTORY_BUDGET = 250_000
# The baseline is grey; Okabe and Ito's colours, told apart by all common kinds of colour vision, go to the others.
COLOURS = {"standard": 0, "polar": 1, "rfa": 2, "xsa": 3}
N_COLOURS, N_DASHES = 7, 4
VALIDATED = tuple(f"val/{metric.name}" for metric in METRICS)


def build_payload(
    groups: Sequence[Group], judgement: Judgement, out: Path | None, reload_seconds: float | None = None
) -> dict[str, Any]:
    """The page's data; links to run folders are relative to where the page is written."""
    styles = _styles(groups)
    points = int(np.clip(POINT_BUDGET / max(1, sum(len(g.runs) for g in groups)), MIN_POINTS, MAX_POINTS))
    runs, shown_groups = [], []
    for index, group in enumerate(groups):
        unequal = judgement.rows[index].role == UNEQUAL
        shown_groups.append({"label": group.label, "block": group.block, "unequal": unequal, **styles[index]})
        runs += [{"group": index, **run} for run in _runs(group, points, out, judgement.measure.name)]
    diagnostics = [_diagnostics(group) for group in groups]
    _fit_history(diagnostics)
    names = {name for d in diagnostics if d for part in ("final", "profiles") for name in d[part]}
    return {
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "reload": reload_seconds,
        "metric": judgement.measure.name,
        "unit": judgement.measure.unit,
        "title": judgement.measure.title,
        "split": judgement.measure.split,
        "validation": validation_caption(groups, judgement.measure.split),
        "verdict": verdict_data(groups, judgement),
        "references": {metric.name: reference_losses(groups, metric.name) for metric in METRICS},
        "metrics": {
            m.name: {
                "title": m.title,
                "unit": m.unit,
                "meaning": m.description,
                "comparable": m.comparable,
                "log": m.is_log,
            }
            for m in METRICS
            if any(m.name in run["val"] for run in runs)
        },
        "records": curve_panels(groups),
        "oneTokenizer": judgement.one_tokenizer,
        "groups": shown_groups,
        "runs": runs,
        "diagnostics": diagnostics,
        "quantities": {name: _words(quantity_named(name)) for name in sorted(names)},
    }


def _words(quantity: Quantity) -> dict[str, Any]:
    return {
        "title": quantity.title,
        "axis": quantity.axis,
        "meaning": quantity.meaning,
        "within": quantity.within_block,
    }


def rounded(value: Any, digits: int = 5) -> Any:
    """Numbers with few digits (a page has no use for sixteen) and nan as null."""
    if isinstance(value, np.ndarray):
        return rounded(value.tolist(), digits)
    if isinstance(value, list):
        return [rounded(v, digits) for v in value]
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{digits}g}")


def link_to(folder: Path, out: Path | None) -> str:
    """A relative address of a run folder, so that page and runs can move together."""
    try:
        path = os.path.relpath(folder, out.parent) if out else str(folder)
    except ValueError:  # another drive on Windows
        return folder.as_uri()
    return quote(path.replace(os.sep, "/")) + "/"


def _runs(group: Group, points: int, out: Path | None, metric: str) -> list[dict[str, Any]]:
    """The runs of a group with curves thinned alike, so that the page can average them at equal steps."""
    last_step = max((float(run.metrics.columns["step"].max()) for run in group.runs if len(run.metrics)), default=1.0)
    edges = bucket_edges(last_step, points)
    validations = [run.metrics.stream(*VALIDATED) for run in group.runs]
    every = max(1, -(-max(len(v["step"]) for v in validations) // points))
    entries = []
    for run, val in zip(group.runs, validations):
        # Evaluations are picked, not averaged; the same ones in every seed, and the last of each.
        rows = np.arange(len(val["step"]))
        picked = {name: column[(rows % every == 0) | (rows == rows.size - 1)] for name, column in val.items()}
        train = thin(run.metrics.stream("train/loss", "train/lr", "train/grad_norm"), edges)
        entries.append(_run(run, train, picked, out, metric))
    return entries


def _run(
    run: Run, train: dict[str, np.ndarray], val: dict[str, np.ndarray], out: Path | None, metric: str
) -> dict[str, Any]:
    per_token = run.number("flops_per_token") or _ratio(run.number("flops"), run.number("tokens"))
    return {
        "name": run.name,
        "seed": run.seed,
        "status": run.status,
        "href": link_to(run.folder, out),
        "flopsPerToken": per_token,
        "speed": run.number("tokens_per_second"),
        "final": run.number(metric),
        "cost": {"flops": run.flops, **{name: run.number(name) for name in ("seconds", "parameters", "tokens")}},
        "train": {
            "at": rounded(train["bucket"], 8),
            "tokens": rounded(train["tokens"]),
            "seconds": rounded(train["seconds"]),
            "loss": rounded(train["train/loss"]),
            "lr": rounded(train["train/lr"], 3),
            "gradNorm": rounded(train["train/grad_norm"], 4),
        },
        "val": {
            "at": rounded(val["step"], 8),
            "tokens": rounded(val["tokens"], 8),
            "seconds": rounded(val["seconds"]),
            **{m.name: rounded(val[f"val/{m.name}"], 6) for m in METRICS if np.isfinite(val[f"val/{m.name}"]).any()},
        },
    }


def _styles(groups: Sequence[Group]) -> list[dict[str, int | float]]:
    """One colour per block, or per family when blocks are too many; dashes and shades tell its members apart."""
    kinds = [g.block for g in groups]
    if len(set(kinds)) > N_COLOURS:
        kinds = [g.family for g in groups]
    largest = max((kinds.count(kind) for kind in kinds), default=0)
    if len(set(kinds)) == 1 or (largest > N_DASHES and len(kinds) - largest <= 2):
        kinds = [g.label for g in groups]  # variants of one block: shades of one colour would look alike
    wanted = list(dict.fromkeys(kinds))
    colour = {kind: COLOURS[kind] for kind in wanted if kind in COLOURS}
    free = [c for c in range(N_COLOURS) if c not in colour.values()] or list(range(N_COLOURS))
    for i, kind in enumerate(k for k in wanted if k not in colour):
        colour[kind] = free[i % len(free)]
    styles: list[dict[str, int | float]] = []
    for index, kind in enumerate(kinds):
        # Members are all groups of this colour, so that no two groups look the same.
        members = [i for i, other in enumerate(kinds) if colour[other] == colour[kind]]
        rank = members.index(index)
        shade = 0.55 * rank / (len(members) - 1) if len(members) > 1 else 0.0
        styles.append({"colour": colour[kind], "dash": rank % N_DASHES, "shade": round(shade, 3)})
    return styles


def _diagnostics(group: Group) -> dict[str, Any] | None:
    """Probes averaged over the seeds at the steps that all of them have; of finished seeds where there are any."""
    having = [run for run in group.runs if run.probes]
    over = [run for run in having if run.status == "finished"]
    probed = [{p.step: p for p in run.probes} for run in over or having]
    if not probed:
        return None
    common = sorted(set.intersection(*(set(p) for p in probed)))
    if not common:  # seeds probed at other steps: the longest one speaks for the group
        probed = [max(probed, key=len)]
        common = sorted(probed[0])
    at = [[run[step] for run in probed] for step in common]
    final: dict[str, Any] = {}
    for name in at[-1][0].values:
        values = _stack(at[-1], name)
        if values is None:
            continue
        final[name] = {"mean": values.mean(0)}
        if values.ndim == 2 and len(values) > 1:
            final[name] |= {"low": values.min(0), "high": values.max(0)}
    profiles = {}
    for name, first in at[-1][0].profiles.items():
        same = [p.profiles[name]["y"] for p in at[-1] if name in p.profiles]
        if all(y.shape == first["y"].shape for y in same):
            profiles[name] = {"x": first["x"], "y": np.mean(same, axis=0), "xlabel": first["xlabel"]}
    history: dict[str, list[np.ndarray | None]] = {name: [] for name in final}
    for probes in at:
        for name in history:
            values = _stack(probes, name)
            history[name].append(None if values is None else values.mean(0))
    shape = {name: final[name]["mean"].shape for name in final}
    kept = {
        name: np.stack([np.full(shape[name], np.nan) if v is None or v.shape != shape[name] else v for v in series])
        for name, series in history.items()
    }
    tokens = [probes[0].tokens for probes in at]
    layers = at[-1][0].layers
    return {"tokens": tokens, "layers": layers, "final": final, "profiles": profiles, "history": kept}


def _stack(probes: Sequence[StoredProbe], name: str) -> np.ndarray | None:
    """(seeds, …) of one quantity, or None when a seed lacks it or has another shape."""
    arrays = [p.values.get(name) for p in probes]
    if any(v is None or v.shape != arrays[0].shape for v in arrays):  # type: ignore[union-attr]
        return None
    return np.stack(arrays)  # type: ignore[arg-type]


def _fit_history(diagnostics: list[dict[str, Any] | None]) -> None:
    """Round everything, and average trajectories over heads (parameters last) until they fit into the page."""
    present = [d for d in diagnostics if d]

    def size() -> int:
        return sum(array.size for d in present for array in d["history"].values())

    for keep in ("parameters/", None):
        if size() > HISTORY_BUDGET:
            for d in present:
                for name, array in d["history"].items():
                    if array.ndim == 3 and not (keep and name.startswith(keep)):
                        d["history"][name] = array.mean(-1)
    every = math.ceil(size() / HISTORY_BUDGET)
    for d in present:
        if every > 1:
            rows = sorted({*range(0, len(d["tokens"]), every), len(d["tokens"]) - 1})
            d["tokens"] = [d["tokens"][i] for i in rows]
            d["history"] = {name: array[rows] for name, array in d["history"].items()}
    many = len(present) > 12
    for d in present:
        d["tokens"] = rounded(d["tokens"], 8)
        d["history"] = {name: rounded(array, 4) for name, array in d["history"].items()}
        d["final"] = {n: {k: rounded(v, 4) for k, v in part.items()} for n, part in d["final"].items()}
        for profile in d["profiles"].values():
            y = profile["y"]
            profile["y"] = rounded(y.mean(1, keepdims=True) if many and y.ndim == 3 else y, 4)
            profile["x"] = rounded(profile["x"])


def bucket_edges(last_step: float, points: int) -> np.ndarray:
    """Step borders of about `points` buckets: dense at the start (for logarithmic axes), even afterwards."""
    last = max(float(last_step), 1.0)
    early = np.geomspace(1, last, points // 4 + 1)
    edges = np.unique(np.ceil(np.concatenate([early, np.linspace(0, last, points - points // 4 + 1)])))
    return edges[edges > 0]


def thin(stream: dict[str, np.ndarray], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Average each column of a stream over the buckets (edges[k−1], edges[k]]; empty buckets are left out.

    Runs that are thinned with the same edges stay aligned, so that their mean over seeds is a mean at equal steps.
    A bucket that holds a nan stays nan: a diverged loss must not be averaged away.
    """
    step = stream["step"]
    if len(step) == 0:
        return {**stream, "bucket": np.empty(0)}
    bucket = np.minimum(np.searchsorted(edges, step, side="left"), len(edges) - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(np.append(starts, len(step)))
    thinned = {name: np.add.reduceat(values, starts) / counts for name, values in stream.items()}
    return {**thinned, "bucket": edges[bucket[starts]]}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
