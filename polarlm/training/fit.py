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
    from polarlm.training.callbacks import Probing, Recorder, Steps, Validation
    from polarlm.training.checkpointing import Checkpointing
    from polarlm.training.incidents import Incidents
    from polarlm.training.loggers.progress import Progress
    from polarlm.training.loggers.throughput import HardwarePeak, StepTimes
    from polarlm.training.module import LanguageModel
    from polarlm.training.ranks import cluster_plugins, is_first
    from polarlm.training.signals import GracefulStop

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
        recorder,
        folder / "checkpoints",
        every=t["checkpoint_every"],
        keep=t["keep_checkpoints"],
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
