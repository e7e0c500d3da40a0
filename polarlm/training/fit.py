"""Lightning's loop with our callbacks around it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlm.training.job import Job


def fit(job: Job, folder: Path, loggers: Sequence[Any] = (), extra: Sequence[Any] = ()) -> None:
    """Train until the last step; a rewind (training/incidents.py) ends one pass of Lightning's loop and begins another.

    `loggers` copy what metrics.jsonl gets; `extra` callbacks come after ours.
    """
    while fit_once(job, folder, loggers, extra):
        pass


def fit_once(job: Job, folder: Path, loggers: Sequence[Any], extra: Sequence[Any]) -> bool:
    """Lightning's loop with our callbacks, from the newest checkpoint on; True when it must go on from there again."""
    import lightning.pytorch as pl

    from polarlm.runs.checkpoints import SafeCheckpointIO, call_last, candidates, newest_usable
    from polarlm.runs.incidents import detours
    from polarlm.training.callbacks import Recorder, StepSeed, Validation
    from polarlm.training.checkpointing import Checkpointing
    from polarlm.training.incidents import Incidents
    from polarlm.training.loggers.json_lines import JsonLines
    from polarlm.training.loggers.progress import Progress
    from polarlm.training.loggers.throughput import HardwarePeak, StepTimes
    from polarlm.training.module import LanguageModel
    from polarlm.training.probing import Probing
    from polarlm.training.ranks import cluster_plugins, is_first
    from polarlm.training.signals import GracefulStop
    from polarlm.training.steps import Steps

    t, config = job.config["trainer"], job.config
    rows = JsonLines(folder / "metrics.jsonl")
    recorder = Recorder(
        batch_tokens=job.plan.tokens,
        flops_per_token=job.model.flops_per_token(job.plan.context),
        log_every=t["log_every"],
        peak=HardwarePeak(job.accelerator, job.precision, job.plan.processes),
    )
    progress = Progress(recorder, job.plan.tokens)
    probing = Probing(recorder, job.data, config["diagnostics"], folder)
    checkpointing = Checkpointing(
        recorder,
        folder / "checkpoints",
        every=t["checkpoint_every"],
        keep=t["keep_checkpoints"],
        flush=(rows.flush, probing.file.flush),
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
    )
    checkpointing.from_start = incidents.policy == "rewind"
    module = LanguageModel(
        job.model,
        optim=config["optim"],
        schedule=job.schedule,
        batch_tokens=job.plan.tokens,
        max_steps=job.steps,
        compiled=job.compiled,
        incidents=incidents,
    )
    validation = Validation(recorder, every=t["val_every"], on_progress=progress.on_validation_progress)
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
            gradient_clip_val=None,  # the module clips: training/gradients.py
            deterministic=t["deterministic"],
            use_distributed_sampler=False,  # batches are already a function of (seed, step, rank)
            limit_val_batches=0,  # validation is a callback: see training/callbacks.py
            logger=[rows, *loggers],
            callbacks=[StepSeed(config["seed"]), *parts, Steps(parts), *extra],
            plugins=[SafeCheckpointIO(), *cluster_plugins()],
            default_root_dir=folder,
            enable_checkpointing=False,  # ours is a callback: see training/checkpointing.py
            enable_model_summary=False,
            log_every_n_steps=10**9,  # rows are written by Recorder
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
            print(f"Stopped at step {trainer.global_step}; the same command continues {folder}", file=sys.stderr)
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
