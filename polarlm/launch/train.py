"""One training job: from a composed configuration to a finished run folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.errors import UserError
from polarlm.launch.table import final_table
from polarlm.model import GPT
from polarlm.training.batching import BatchPlan, plan_batches, total_steps
from polarlm.training.build import build_model, warn_about_idle_settings
from polarlm.training.hardware import choose_accelerator, choose_compile, choose_precision, use_tensor_cores
from polarlm.training.loggers.sinks import build_loggers, command_overrides, finish_loggers, sweep_group
from polarlm.training.run_folder import choose_folder, environment, read_json, write_json, write_text

FOLDER_VARIABLE = "POLARLM_RUN_DIR"  # how rank 0 tells the processes it starts where the run lives


def train(cfg: DictConfig) -> float:
    """Train, evaluate and describe one run; returns the validation loss."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config = resolve(cfg)
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        if config["trainer"]["devices"] != 1 or config["trainer"]["nodes"] != 1:
            return train_in_own_process(list(hydra.overrides.task), config)
        try:
            return train_config(config)
        finally:
            torch._dynamo.reset()  # compiled code of one job must not reach the next
    return train_config(config)


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, with the chosen names of every group beside it."""
    from hydra.core.hydra_config import HydraConfig

    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise UserError(f"{', '.join(sorted(missing))} must be given, for example {sorted(missing)[0]}=…")
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    choices = HydraConfig.get().runtime.choices
    config["choices"] = {k: v for k, v in choices.items() if "hydra" not in k and v is not None}
    known = (
        set(OmegaConf.load(Path(__file__).resolve().parents[2] / "configs" / "train.yaml"))
        | set(GROUP_KEYS)
        | {"choices"}
    )
    for key in config.keys() - known:
        warnings.warn(f"The setting '{key}' is not known to polarlm and has no effect", stacklevel=2)
    config["group"] = config["group"] or sweep_group(config, *command_overrides())
    if not isinstance(config["seed"], int) or config["seed"] < 0:
        raise UserError(f"seed={config['seed']!r} must be a whole number from 0 up")
    return config


GROUP_KEYS = ("model", "block", "data", "tokenizer", "optim", "schedule", "trainer", "logger", "diagnostics")


def train_in_own_process(overrides: list[str], config: dict[str, Any]) -> float:
    """A sweep's job with several processes: started on its own, so that its ranks do not start the sweep again."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get().job
    done = subprocess.run([sys.executable, sys.argv[0], *overrides, f"hydra.job.name={job.name}"], check=False)
    if done.returncode:
        raise RuntimeError(f"the job ended with exit code {done.returncode}; its own output above says why")
    folder = newest_finished(config)
    return float(read_json(folder / "summary.json")["val/loss"])


def newest_finished(config: dict[str, Any]) -> Path:
    """The folder of the run of this configuration that finished last."""
    from polarlm.training.run_folder import default_name

    name = config["name"] or default_name(config)
    folders = [p.parent for p in Path(config["runs_dir"]).glob("*/summary.json") if p.parent.name.startswith(name)]
    return max(folders, key=lambda folder: (folder / "summary.json").stat().st_mtime)


@dataclass
class Job:
    """Everything a run needs, built and checked before its folder is touched."""

    config: dict[str, Any]
    corpus: Corpus
    model: GPT
    data: LMDataModule
    plan: BatchPlan
    steps: int
    accelerator: str
    precision: str
    compiled: bool


def prepare(config: dict[str, Any]) -> Job:
    """Build corpus, model and plan; every wrong input is found here, before anything is written."""
    t = config["trainer"]
    accelerator = choose_accelerator(t["accelerator"])
    precision = choose_precision(t["precision"], accelerator)
    compiled = choose_compile(t["compile"], accelerator)
    if t["strategy"] not in ("auto", "ddp", "fsdp"):
        raise UserError(f"trainer.strategy={t['strategy']!r} is unknown; choose auto, ddp or fsdp")
    processes = int(t["devices"]) * int(t["nodes"])
    plan = plan_batches(int(t["batch_tokens"]), config["model"]["context"], processes, int(t["micro_batch_tokens"]))
    steps = total_steps(t["max_steps"], t["max_tokens"], plan.tokens)
    corpus = build_corpus(config["data"], config["tokenizer"], config["cache_dir"])
    data = LMDataModule(
        corpus,
        context=plan.context,
        micro_batch=plan.micro,
        seed=config["seed"],
        **{key: config["data"][key] for key in ("mask_documents", "packing", "eval_tokens")},
    )
    torch.manual_seed(config["seed"])
    model = build_model(config, corpus.tokenizer.vocab_size)
    warn_about_idle_settings(model, config["block"])
    return Job(config, corpus, model, data, plan, steps, accelerator, precision, compiled)


def train_config(config: dict[str, Any]) -> float:
    """Train one resolved configuration in this process (and the ones Lightning starts beside it)."""
    quiet_libraries()
    use_tensor_cores()
    job = prepare(config)
    first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
    if FOLDER_VARIABLE in os.environ and not first:
        folder, again, note = Path(os.environ[FOLDER_VARIABLE]), True, None
    else:
        folder, again, note = choose_folder(config)
    if first:
        if note:
            print(note, file=sys.stderr)
        open_folder(folder, job, again=again)
        print(headline(job, folder, again=again), file=sys.stderr, flush=True)
        if job.plan.processes > 1:
            os.environ[FOLDER_VARIABLE] = str(folder)
    loggers: list[Any] = []
    status = "finished"
    try:
        loggers = build_loggers(config, folder)
        fit(job, folder, loggers)
        return finish(job, folder) if first else float("nan")
    except BaseException as error:
        status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        if first:
            summary = read_json(folder / "summary.json") or {}
            write_json(
                folder / "summary.json", {**summary, "status": status, "error": f"{type(error).__name__}: {error}"}
            )
        raise
    finally:
        finish_loggers(loggers, status)  # after summary.json, which they copy
        os.environ.pop(FOLDER_VARIABLE, None) if first else None


def open_folder(folder: Path, job: Job, *, again: bool) -> None:
    """Write what identifies the run; a continued run keeps what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not again:
        job.corpus.tokenizer.save(folder / "tokenizer")
        write_json(folder / "corpus.json", job.corpus.describe())
    write_json(folder / "environment.json", environment())
    parts = {
        "name": folder.name,
        "block": job.config["choices"]["block"],
        "group": job.config["group"],
        "seed": job.config["seed"],
    }
    write_json(folder / "summary.json", {**parts, "parameters": job.model.parameter_count(), "status": "running"})
    if not again:
        # Last: config.yaml is what makes the folder a run folder.
        write_text(folder / "config.yaml", yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True))


def headline(job: Job, folder: Path, *, again: bool) -> str:
    """What is about to happen, in three lines."""
    choices, plan = job.config["choices"], job.plan
    tokens = len(job.corpus.store("train"))
    where = f"{job.accelerator}, {job.precision}" + (", compiled" if job.compiled else "")
    if plan.processes > 1:
        where = f"{plan.processes} processes ({job.config['trainer']['strategy']}), {where}"
    epochs = job.steps * plan.tokens / tokens
    return (
        f"{'Continuing' if again else 'Training'} {folder}\n"
        f"  {choices['block']} block, {choices['model']} model, {job.model.parameter_count():,} parameters; {where}\n"
        f"  {choices['data']}: {tokens:,} tokens "
        f"({choices['tokenizer']}, vocabulary {job.corpus.tokenizer.vocab_size:,}); "
        f"{job.steps:,} steps of {plan.tokens:,} tokens, {epochs:.1f} passes"
    )


def fit(job: Job, folder: Path, loggers: Sequence[Any] = (), extra: Sequence[Any] = ()) -> None:
    """Lightning's loop with our callbacks, and `extra` ones after them; `loggers` copy what metrics.jsonl gets."""
    import lightning.pytorch as pl

    from polarlm.training.callbacks import Recorder, StepSeed, Validation
    from polarlm.training.checkpoints import LastCheckpoint, SafeCheckpointIO
    from polarlm.training.loggers.json_lines import JsonLines
    from polarlm.training.loggers.progress import Progress
    from polarlm.training.loggers.throughput import StepTimes, hardware_peak
    from polarlm.training.module import LanguageModel
    from polarlm.training.probing import Probing
    from polarlm.training.signals import GracefulStop

    t, config = job.config["trainer"], job.config
    recorder = Recorder(
        batch_tokens=job.plan.tokens,
        flops_per_token=job.model.flops_per_token(job.plan.context),
        log_every=int(t["log_every"]),
        peak=hardware_peak(job.accelerator, job.precision, job.plan.processes),
    )
    progress = Progress(recorder, job.plan.tokens)
    checkpoint = LastCheckpoint(folder / "checkpoints", int(t["checkpoint_every"]))
    module = LanguageModel(
        job.model,
        optim=config["optim"],
        schedule=config["schedule"],
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
            gradient_clip_val=config["optim"]["grad_clip"],
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


def finish(job: Job, folder: Path) -> float:
    """Weights for sharing, a sample, pictures, the summary and the table."""
    from polarlm.data.baselines import ngram_losses
    from polarlm.evaluation.generate import sample_text
    from polarlm.evaluation.judge import baseline_numbers
    from polarlm.evaluation.restore import load_run, load_weights, save_weights
    from polarlm.report.figure import write_summary_png
    from polarlm.training.loggers.json_lines import JsonLines

    config = job.config
    checkpoints = folder / "checkpoints"
    save_weights(
        load_weights(checkpoints / "last.ckpt"), checkpoints / "model.safetensors", tied=job.model.config.tie_embeddings
    )
    run = load_run(folder)
    rows = JsonLines(folder / "metrics.jsonl").rows()
    last = rows[-1]
    typical = {key: median(rows, key) for key in ("tokens_per_second", "mfu", *STEP_PARTS)}
    parts = {key.removeprefix("time/"): typical.pop(key) for key in STEP_PARTS}
    options = config["sample"]
    sample = sample_text(
        run.model,
        run.tokenizer,
        options["prompt"],
        int(options["tokens"]),
        temperature=float(options["temperature"]),
        top_k=options["top_k"],
        seed=config["seed"],
    )
    summary = {
        **(read_json(folder / "summary.json") or {}),
        **{key: value for key, value in last.items() if key.startswith(("val/", "test/"))},
        "step": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        **typical,
        "step_seconds": parts,
        "flops_per_token": job.model.flops_per_token(job.plan.context),
        "baselines": baseline_numbers(ngram_losses(job.corpus), job.corpus),
        "sample": sample,
        "status": "finished",
    }
    summary.pop("error", None)
    write_json(folder / "summary.json", summary)
    write_summary_png(folder)
    print(final_table(summary, folder, sample))
    return float(summary["val/loss"])


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
        ".*LeafSpec.*",
        ".*Checkpoint directory.*",
        ".*isinstance\\(treespec.*",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.formatwarning = lambda message, *where: f"warning: {message}\n"  # the place in our code helps nobody
