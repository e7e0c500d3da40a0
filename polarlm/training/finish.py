"""What is made of a trained model: weights for sharing, a sample, the summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polarlm.runs.files import json_lines, read_json, write_json
from polarlm.training.job import Job


def finish(job: Job, folder: Path, pictures: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """Write weights for sharing, a sample and pictures; the summary says `finished` only after all of them."""
    from polarlm.evaluation.baselines import baseline_metrics
    from polarlm.evaluation.generate import Sampling, answered_example, stream_text
    from polarlm.runs.checkpoints import remove_old, step_file
    from polarlm.runs.restore import load_weights, restore_run, save_weights
    from polarlm.training.loggers.throughput import believable_share

    config = job.config
    checkpoints = folder / "checkpoints"
    save_weights(
        load_weights(checkpoints / "last.ckpt"), checkpoints / "model.safetensors", tied=job.model.config.tie_embeddings
    )
    run = restore_run(folder, typed=True)
    rows = json_lines(folder / "metrics.jsonl")
    last = rows[-1]
    # Of a run that was killed while it let the oldest go.
    remove_old(checkpoints, step_file(checkpoints, last["step"]), config["trainer"]["keep_checkpoints"])
    parts = {key.removeprefix("time/"): median(rows, key) for key in STEP_PARTS}
    flops_per_token = job.model.flops_per_token(job.plan.context)
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    speed = statistics.median(speeds) if speeds else None  # of the steady state: training/callbacks.py
    peak = max((row["peak_flops"] for row in rows if row.get("peak_flops")), default=None)
    options = config["sample"]
    sampling = Sampling(temperature=options["temperature"], top_k=options["top_k"], seed=config["seed"])
    if job.corpus.probe is not None:  # continuing symbols that nobody asked for would say nothing
        sample = answered_example(run.model, job.corpus.probe) if options["tokens"] else ""
    else:
        sample = "".join(stream_text(run.model, run.tokenizer, options["prompt"], options["tokens"], sampling))
    summary = {
        **(read_json(folder / "summary.json") or {}),
        **{key: value for key, value in last.items() if key.startswith(("val/", "test/"))},
        "step": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "training_seconds": last.get("training_seconds"),
        "processor_seconds": last.get("processor_seconds"),
        "compile_seconds": last.get("compile_seconds"),
        "tokens_per_second": speed,
        "mfu": believable_share(speed and speed * flops_per_token, peak),
        "step_seconds": parts,
        "flops_per_token": flops_per_token,
        "baselines": baseline_metrics(job.corpus),
        "sample": sample,
    }
    summary.pop("error", None)
    write_json(folder / "summary.json", summary)
    if pictures:
        pictures(folder)
    summary["status"] = "finished"
    write_json(folder / "summary.json", summary)
    return summary


STEP_PARTS = ("time/data", "time/forward", "time/backward", "time/optimiser")


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    """The median of a metric over its rows; the first, which pays for warming up, is left out when there are more."""
    values = [row[key] for row in rows if row.get(key) is not None]
    values = sorted(values[1:] or values)
    return values[len(values) // 2] if values else None
