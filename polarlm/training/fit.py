"""Lightning's loop with our callbacks around it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlm.training.job import Job


def fit(job: Job, folder: Path, loggers: Sequence[Any] = (), extra: Sequence[Any] = ()) -> None:
    """Lightning's loop with our callbacks, and `extra` ones after them; `loggers` copy what metrics.jsonl gets."""
    import lightning.pytorch as pl

    from polarlm.runs.checkpoints import SafeCheckpointIO
    from polarlm.training.callbacks import Recorder, StepSeed, Validation
    from polarlm.training.checkpointing import LastCheckpoint
    from polarlm.training.loggers.json_lines import JsonLines
    from polarlm.training.loggers.progress import Progress
    from polarlm.training.loggers.throughput import HardwarePeak, StepTimes
    from polarlm.training.module import LanguageModel
    from polarlm.training.probing import Probing
    from polarlm.training.signals import GracefulStop

    t, config = job.config["trainer"], job.config
    recorder = Recorder(
        batch_tokens=job.plan.tokens,
        flops_per_token=job.model.flops_per_token(job.plan.context),
        log_every=int(t["log_every"]),
        peak=HardwarePeak(job.accelerator, job.precision, job.plan.processes),
    )
    progress = Progress(recorder, job.plan.tokens)
    checkpoint = LastCheckpoint(folder / "checkpoints", int(t["checkpoint_every"]))
    module = LanguageModel(
        job.model,
        optim=config["optim"],
        schedule=job.schedule,
        batch_tokens=job.plan.tokens,
        max_steps=job.steps,
        compiled=job.compiled,
    )
    validation = Validation(recorder, every=int(t["val_every"]), on_progress=progress.on_validation_progress)
    stop = GracefulStop(agree_every=int(t["log_every"]))
    probing = Probing(recorder, job.data, config["diagnostics"], folder)
    try:
        trainer = pl.Trainer(
            accelerator=job.accelerator,
            devices=int(t["devices"]),
            num_nodes=int(t["nodes"]),
            strategy=build_strategy(t["strategy"], job.plan.processes),
            precision=job.precision,  # type: ignore[arg-type]
            max_steps=job.steps,
            max_epochs=-1,
            accumulate_grad_batches=job.plan.accumulate,
            gradient_clip_val=None,  # the module clips: training/gradients.py
            deterministic=bool(t["deterministic"]),
            use_distributed_sampler=False,  # batches are already a function of (seed, step, rank)
            limit_val_batches=0,  # validation is a callback: see training/callbacks.py
            logger=[JsonLines(folder / "metrics.jsonl"), *loggers],
            callbacks=[
                StepTimes(recorder),
                StepSeed(config["seed"]),
                validation,
                probing,
                recorder,
                progress,
                stop,
                *extra,
                checkpoint,
            ],
            plugins=[SafeCheckpointIO()],
            default_root_dir=folder,
            enable_model_summary=False,
            log_every_n_steps=10**9,  # rows are written by Recorder
        )
        trainer.fit(module, datamodule=job.data, ckpt_path=str(checkpoint.path) if checkpoint.path.exists() else None)
        if stop.exit_code is not None:
            print(f"Stopped at step {trainer.global_step}; the same command continues {folder}", file=sys.stderr)
            sys.exit(stop.exit_code)
    finally:
        progress.close()


def build_strategy(name: str, processes: int) -> Any:
    """Lightning's strategy for trainer.strategy; FSDP is FSDP2 with one full checkpoint file."""
    if name == "fsdp":
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if name == "auto":
        return "ddp" if processes > 1 else "auto"
    return name
