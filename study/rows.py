"""A finished run as one small row: its settings, results, cost and command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.evaluation.metrics import METRICS
from polarlm.runs.files import json_object
from polarlm.runs.identity import experiment_of, flatten, identity_of, key_of
from polarlm.runs.measurements import read_evaluations, read_incidents
from polarlm.runs.reading import Run, read_run
from study.plan import PlannedRun, Question

IDENTITY_DIGITS = 16
LONGEST_CURVE = 16  # validations kept of a run
FACTS = ("parameters", "tokens", "step", "seconds", "training_seconds", "processor_seconds", "flops_per_token")
# Where a run was written and who listened: not part of the command that makes its numbers again.
PRIVATE = ("runs_dir", "cache_dir", "name", "group", "logger", "resume")
LEFT_OUT_OF_RECORDS = ("protocol", "arrays", "run")


def row_of(folder: Path, job: PlannedRun, question: Question) -> dict[str, Any]:
    """The row of a run folder that is this job's."""
    run = read_run(folder)
    part = question.parts[job.part]
    metric = question.metric_of(part).rpartition("/")[2]
    environment = json_object(folder / "environment.json")
    row = {
        "part": job.part,
        "variant": job.variant,
        "stage": job.stage,
        "value": job.value,
        "seed": job.seed,
        "status": run.status,
        "block": run.block,
        "identity": identity_of(run.config)[:IDENTITY_DIGITS],
        "command": f"python train.py {' '.join(text for text in job.overrides if key_of(text) not in PRIVATE)}",
        "commit": str(environment.get("git_commit") or "")[:9] + "+" * bool(environment.get("git_dirty")),
        "torch": (environment.get("versions") or {}).get("torch"),
        "threads": (environment.get("cpu") or {}).get("threads"),
        "gpus": environment.get("gpus") or [],
        **{name: _round(number, 9) for name in _metric_names(metric) if (number := run.number(name)) is not None},
        **{name: _round(number, 7) for name in FACTS if (number := run.number(name)) is not None},
        "seconds_per_step": step_seconds_of(run),
        "incidents": len(read_incidents(folder)),
    }
    if run.status == "failed":
        row["error"] = str(run.summary.get("error", ""))[:200]
    if job.stage == "seeds":
        row["curve"] = curve_of(run, f"val/{metric}")
        if part.probes:
            row["probes"] = probes_of(run, part.probes)
        if part.evaluate:
            row["evaluations"] = evaluations_of(folder, part.evaluate)
    return row


def settings_of_run(config: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides a run's numbers, as dotted keys, without its seed."""
    return {key: value for key, value in flatten(experiment_of(config)) if key != "seed"}


def step_seconds_of(run: Run) -> float | None:
    """Time of a step without validation and probes: the processor's where it is known, else the median that passed."""
    processor, steps = run.number("processor_seconds"), run.number("step")
    if processor and steps:
        return _round(processor / steps, 4)
    parts = run.summary.get("step_seconds")
    known = [v for v in parts.values() if isinstance(v, (int, float))] if isinstance(parts, dict) else []
    return _round(sum(known), 4) if known else None


def curve_of(run: Run, name: str) -> dict[str, list[float]]:
    """The validation curve, thinned, with the axes it can be read against."""
    if name not in run.metrics.columns:
        return {}
    stream = run.metrics.stream(name)
    rows = len(stream["step"])
    kept = np.unique(np.linspace(0, max(rows - 1, 0), min(rows, LONGEST_CURVE)).round().astype(int))
    return {
        key: [_round(float(stream[key][i]), 6) for i in kept]
        for key in ("step", "tokens", "seconds", "processor_seconds", name)
        if key in stream and np.isfinite(stream[key]).all()
    }


def probes_of(run: Run, names: tuple[str, ...]) -> dict[str, Any]:
    """The last probe's values of the wanted diagnostics, heads averaged: one number per layer."""
    if not run.probes:
        return {}
    quantities = {}
    for name in names:
        values = run.probes[-1].values.get(name)
        if values is not None:
            per_layer = values.mean(axis=-1) if values.ndim == 2 else np.atleast_1d(values)
            quantities[name] = [_round(float(v), 4) for v in per_layer]
    return quantities


def asked_protocols(settings: Sequence[str]) -> set[str]:
    """The protocols that these settings of eval.py name."""
    return {name for text in settings if text.startswith("protocol=") for name in text[9:].split(",")}


def wanted_evaluations(folder: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """What eval.py found with these settings: of the protocols they name, on as many tokens as they name."""
    names = asked_protocols(settings)
    # A number of tokens that was asked for has one target less; other amounts of text were somebody else's wish.
    tokens = {int(text[7:]) - 1 for text in settings if text.startswith("tokens=")}
    return [
        record
        for record in read_evaluations(folder)
        if record["protocol"]["name"] in names and (not tokens or record["protocol"].get("tokens") in tokens)
    ]


def evaluations_of(folder: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """The same without arrays and fingerprints."""
    rows = []
    for record in wanted_evaluations(folder, settings):
        protocol = {k: v for k, v in record["protocol"].items() if k not in ("corpus", "weights", "tokenizer")}
        numbers = {k: rounded_record(v) for k, v in record.items() if k not in LEFT_OUT_OF_RECORDS}
        rows.append({"protocol": protocol, **numbers})
    return rows


def rounded_record(value: Any) -> Any:
    """The same structure with five digits per number, without perplexities."""
    if isinstance(value, dict):
        exponentials = {metric.name for metric in METRICS if metric.is_log}
        return {key: rounded_record(item) for key, item in value.items() if key not in exponentials}
    if isinstance(value, list):
        return [rounded_record(item) for item in value]
    return _round(value, 5) if isinstance(value, float) else value


def _metric_names(decisive: str) -> list[str]:
    """What is kept of both splits: the metric that decides, and all but the perplexities, which say a loss again."""
    names = [metric.name for metric in METRICS if not metric.is_log or metric.name == decisive]
    return [f"{split}/{name}" for split in ("val", "test") for name in names]


def _round(number: float, digits: int) -> Any:
    if not math.isfinite(number):
        return None
    short = float(f"{number:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
