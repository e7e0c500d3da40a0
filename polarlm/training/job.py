"""Everything a run needs, built and checked before its folder is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.errors import UserError
from polarlm.model import GPT
from polarlm.model.build import build_model, warn_about_blind_blocks, warn_about_idle_settings
from polarlm.runs.restore import start_from
from polarlm.training.batching import BatchPlan, plan_run, with_micro_batch
from polarlm.training.hardware import ASKED, choose_accelerator, choose_compile, choose_precision
from polarlm.training.loggers import check_targets
from polarlm.training.optimisers import build_optimiser
from polarlm.training.schedules import build_schedule
from polarlm.training.schedules.warmup import Schedule


@dataclass
class Job:
    """Everything a run needs, built and checked before its folder is touched."""

    config: dict[str, Any]
    corpus: Corpus
    model: GPT
    data: LMDataModule
    plan: BatchPlan
    steps: int
    schedule: Schedule
    accelerator: str
    precision: str
    compiled: bool
    reasons: dict[str, str]  # why precision and compiling were chosen, where `auto` chose them


def build_job(config: dict[str, Any]) -> Job:
    """Build corpus, model and plan; every wrong input is found here, before anything is written."""
    t = config["trainer"]
    check_targets(config)
    accelerator = choose_accelerator(t["accelerator"])
    precision = choose_precision(t["precision"], accelerator)
    plan, steps = plan_run(config)
    schedule = build_schedule(config["schedule"], steps * plan.tokens)
    corpus = build_corpus(config["data"], config["tokenizer"], config["cache_dir"])
    config = with_micro_batch(config, corpus.tokenizer.vocab_size, accelerator, precision.value)
    plan, _ = plan_run(config)
    refuse_shared_stream(corpus, plan.processes)
    data = LMDataModule(
        corpus,
        context=plan.context,
        micro_batch=plan.micro,
        seed=config["seed"],
        **{key: config["data"][key] for key in ("mask_documents", "packing", "eval_tokens")},
    )
    corpus.tokenizer.encode(config["sample"]["prompt"])  # only to refuse now what could not be sampled after training
    torch.manual_seed(config["seed"])
    model = build_model(config, corpus.tokenizer.vocab_size)
    warn_about_blind_blocks(model)
    warn_about_idle_settings(model, config["block"])
    if config.get("init_from"):
        start_from(model, config["init_from"])
    build_optimiser(config["optim"], model)  # only to refuse wrong options now
    flops = model.flops_per_token(plan.context) * plan.tokens / plan.processes
    compiled = choose_compile(t["compile"], accelerator, config["choices"]["block"], flops, steps)
    reasons = {name: c.why for name, c in (("precision", precision), ("compile", compiled)) if c.why != ASKED}
    chosen = accelerator, precision.value, compiled.value == "yes", reasons
    return Job(config, corpus, model, data, plan, steps, schedule, *chosen)


def refuse_shared_stream(corpus: Corpus, processes: int) -> None:
    """Several processes can't train on a stream: where its n-th sequence begins is known only after all before it."""
    if processes > 1 and any(part.stream is not None for part in [corpus, *(part for part, _ in corpus.parts)]):
        raise UserError(
            f"data.streaming=true with {processes} processes: each of them would tokenise the whole stream in one "
            "thread; set data.streaming=false (the text is tokenised once, by all cores), or trainer.devices=1"
        )


def describe_job(job: Job, folder: Path, *, again: bool) -> str:
    """What is about to happen, in three lines, and a fourth where `auto` chose something."""
    choices, plan = job.config["choices"], job.plan
    tokens = len(job.corpus.store("train"))
    where = f"{job.accelerator}, {job.precision}" + (", compiled" if job.compiled else "")
    if plan.processes > 1:
        where = f"{plan.processes} processes ({job.config['trainer']['strategy']}), {where}"
    epochs = job.steps * plan.tokens / tokens
    passes = f"{epochs:,.1f}" if epochs >= 0.1 else f"{epochs:.1g}"
    reasons = "".join(f"\n  {name}: {why}" for name, why in job.reasons.items())
    return (
        f"{'Continuing' if again else 'Training'} {folder}\n"
        f"  {choices['block']} block, {choices['model']} model, {job.model.parameter_count():,} parameters; {where}\n"
        f"  {choices['data']}: {tokens:,} tokens "
        f"({choices['tokenizer']}, vocabulary {job.corpus.tokenizer.vocab_size:,}); "
        f"{job.steps:,} steps of {plan.tokens:,} tokens, {passes} passes{reasons}"
    )
