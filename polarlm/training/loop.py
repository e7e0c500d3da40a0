"""One training run in this process: prepare, open the folder, fit, finish."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from polarlm.printing import fitted
from polarlm.runs.checkpoints import SafeCheckpointIO, call_last, candidates, newest_usable, remove_old, step_file
from polarlm.runs.files import json_lines, read_json, write_json
from polarlm.runs.folder import open_run
from polarlm.runs.identity import RESULT_VARIABLE, refuse_secrets
from polarlm.runs.measurements import detours
from polarlm.runs.restore import load_weights, restore_run, save_weights
from polarlm.training.callbacks import GracefulStop, Probing, RecordBackend, SignOfLife, Steps, Validation
from polarlm.training.checkpointing import Checkpointing
from polarlm.training.hardware import HardwarePeak, believable_share, use_tensor_cores
from polarlm.training.incidents import Incidents
from polarlm.training.job import Job, build_job, describe_job
from polarlm.training.loggers import build_callbacks, build_loggers, finish_loggers
from polarlm.training.loggers.progress import Progress
from polarlm.training.module import LanguageModel
from polarlm.training.ranks import (
    cluster_plugins,
    end_with_starter,
    forget_folder,
    is_first,
    share_folder,
    shared_folder,
)
from polarlm.training.recorder import Recorder, StepTimes


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]


def train_run(config: dict[str, Any], pictures: Callable[[Path], Any] | None = None) -> Result | None:
    """Train one resolved configuration in this process (and the ones Lightning starts beside it).

    `pictures` draws into the folder of a trained run before it is called finished. Ranks other than 0 return None.
    """
    quiet_libraries()
    use_tensor_cores()
    refuse_secrets(config)
    if not is_first():
        end_with_starter()
    job = build_job(config)
    job.check()
    if not is_first():
        folder = shared_folder()
        fit(job, folder, extra=build_callbacks(config, folder))
        return None
    config = job.config
    folder, lock, again = open_run(config, job.corpus, job.model.parameter_count())
    loggers: list[Any] = []
    status = "finished"
    try:
        print(fitted(describe_job(job, folder, again=again), sys.stderr), file=sys.stderr, flush=True)
        chosen = {"accelerator": job.accelerator, "precision": job.precision, "compiled": job.compiled}
        known = read_json(folder / "environment.json") or {}
        write_json(folder / "environment.json", {**known, "chosen": {**chosen, "reasons": job.reasons}})
        share_folder(folder)
        loggers = build_loggers(config, folder)
        for url in filter(None, (getattr(logger, "url", None) for logger in loggers)):
            print(f"  wandb: {url}", file=sys.stderr, flush=True)
            write_json(folder / "summary.json", {**(read_json(folder / "summary.json") or {}), "wandb": url})
        fit(job, folder, loggers, extra=[*build_callbacks(config, folder), SignOfLife(lock), RecordBackend(folder)])
        summary = finish(job, folder, pictures)
        if RESULT_VARIABLE in os.environ:
            Path(os.environ[RESULT_VARIABLE]).write_text(str(folder.resolve()), encoding="utf-8")
        return Result(folder, summary)
    except BaseException as error:
        status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        with contextlib.suppress(Exception):  # a full disk, a damaged summary: what went wrong first is what counts
            summary = read_json(folder / "summary.json") or {}
            write_json(
                folder / "summary.json", {**summary, "status": status, "error": f"{type(error).__name__}: {error}"}
            )
        raise
    finally:
        finish_loggers(loggers, folder, status)  # after summary.json, which they copy
        lock.release()
        forget_folder()


# -- Lightning's loop with our callbacks around it ---------------------------------------------------------------------


def fit(job: Job, folder: Path, loggers: Sequence[Any] = (), extra: Sequence[Any] = ()) -> None:
    """Train until the last step; a rewind (training/incidents.py) ends one pass of Lightning's loop and begins another.

    `loggers` copy what metrics.jsonl gets; `extra` callbacks come after ours.
    """
    while fit_once(job, folder, loggers, extra):
        pass


def fit_once(job: Job, folder: Path, loggers: Sequence[Any], extra: Sequence[Any]) -> bool:
    """Lightning's loop with our callbacks, from the newest checkpoint on; True when it must go on from there again."""
    t, config = job.config["trainer"], job.config
    recorder = Recorder(
        folder,
        batch_tokens=job.plan.tokens,
        flops_per_token=job.model.flops_per_token(job.plan.context),
        log_every=t["log_every"],
        peak=HardwarePeak(job.accelerator, job.precision, job.plan.processes),
    )
    progress = Progress(recorder, job.plan.tokens)
    probing = Probing(recorder, job.data, config["diagnostics"])
    checkpointing = Checkpointing(
        recorder, folder / "checkpoints", every=t["checkpoint_every"], keep=t["keep_checkpoints"]
    )
    incidents = Incidents(
        folder,
        policy=t["on_nonfinite"],
        limit=t["max_incidents"],
        spike_z=float(t["spike_z"] or 0),
        is_read_step=lambda trainer: (
            recorder.is_log_step(trainer, trainer.global_step) or checkpointing.due(trainer) or validation.due(trainer)
        ),
        discard=checkpointing.forget,
        settle=checkpointing.settle,
    )
    checkpointing.from_start = incidents.policy == "rewind"
    module = LanguageModel(
        job.model,
        optim=config["optim"],
        schedule=job.schedule,
        seed=config["seed"],
        compiled=job.compiled,
        incidents=incidents,
    )
    module.log_steps = False  # the recorder writes one row per step to every logger
    validation = Validation(recorder, every=t["val_every"])
    times, stop = StepTimes(recorder), GracefulStop(agree_every=t["log_every"])
    # What happens after a step, in this order: a bad step is noticed before anything is kept of it; the row is on disk
    # before the checkpoint is, so that a kill in between leaves neither gap nor double step.
    parts: list[Any] = [times, incidents, validation, probing, recorder, progress, stop, checkpointing]
    job.data.detours = detours(folder)
    try:
        trainer = pl.Trainer(
            accelerator=job.accelerator,
            devices=t["devices"],
            num_nodes=t["nodes"],
            strategy=build_strategy(t["strategy"], job.plan.processes),
            precision=job.precision,  # type: ignore[arg-type]
            max_steps=job.steps,
            max_epochs=-1,
            accumulate_grad_batches=job.plan.accumulate,
            deterministic=t["deterministic"],
            use_distributed_sampler=False,  # batches are already a function of (seed, step, rank)
            limit_val_batches=0,  # a callback starts it: see training/callbacks.py
            inference_mode=False,
            logger=[recorder.logger, *loggers],
            # At the start the recorder comes first: its clock runs before the first probe pauses it.
            # What a user's callbacks log at a step joins the row that `Steps` has written at its end.
            callbacks=[recorder, *(p for p in parts if p is not recorder), *extra, Steps(parts)],
            plugins=[SafeCheckpointIO(background=True), *cluster_plugins()],
            default_root_dir=folder,
            enable_model_summary=False,
            log_every_n_steps=t["log_every"],  # for callbacks like LearningRateMonitor; rows are written by Recorder
        )
        # FSDP's processes verify the shards together, once they can talk: training/sharding.py.
        checkpoints = folder / "checkpoints"
        together = t["strategy"] == "fsdp"
        newest = next(iter(candidates(checkpoints)), None) if together else newest_usable(checkpoints)
        if newest and not together and is_first():
            call_last(newest)
        trainer.fit(module, datamodule=job.data, ckpt_path=str(newest) if newest else None)
        if incidents.rewound:
            return True
        if stop.exit_code is not None:
            print(f"Stopped at step {trainer.global_step}; the same command resumes {folder}", file=sys.stderr)
            sys.exit(stop.exit_code)
        return False
    finally:
        progress.close()


def build_strategy(name: str, processes: int) -> Any:
    """Lightning's strategy for trainer.strategy."""
    if name == "fsdp":
        from polarlm.training.sharding import ShardedStrategy

        return ShardedStrategy(processes)
    if name == "auto":
        return "ddp" if processes > 1 else "auto"
    return name


# -- what is made of a trained model: weights for sharing, a sample, the summary ---------------------------------------


def finish(job: Job, folder: Path, pictures: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """Write weights for sharing, a sample and pictures; the summary says `finished` only after all of them."""
    from polarlm.evaluation.breakdowns import baseline_metrics
    from polarlm.evaluation.generate import Sampling, answered_example, stream_text

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


def quiet_libraries() -> None:
    """Silence what Lightning says to developers of Lightning; our own messages stay readable."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        ".*have no `validation_step`.*",
        ".*does not have many workers.*",
        ".*your dataloader is not resumable.*",  # it is: a batch is a function of its step
        ".*LeafSpec.*",
        ".*Checkpoint directory.*",
        ".*isinstance\\(treespec.*",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.formatwarning = lambda message, *where: f"warning: {message}\n"  # the place in our code helps nobody
