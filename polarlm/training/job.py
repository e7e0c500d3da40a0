"""Everything a run needs, built and checked before its folder is touched."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.errors import UserError
from polarlm.model import GPT
from polarlm.model.build import build_model, warn_about_blind_blocks, warn_about_idle_settings
from polarlm.runs.restore import start_from
from polarlm.training.batching import BatchPlan, plan_run, with_micro_batch
from polarlm.training.hardware import ASKED, Choice, choose_accelerator, choose_compile, choose_precision
from polarlm.training.loggers import check_targets
from polarlm.training.optimisers import build_optimiser
from polarlm.training.schedules import Schedule, build_schedule


class Job:
    """Everything a run needs. A part is built when it is first asked for; `check` asks for every part.

    The text comes first (`corpus`), then how a step is cut (`plan`), the batches (`data`), and the model with what
    trains it.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked  # the resolved configuration

    def check(self) -> None:
        """Build every part, the cheap ones first: a wrong input raises a UserError before anything is written."""
        check_targets(self.asked)
        plan_run(self.asked)
        _ = self.precision, self.schedule, self.corpus, self.data
        self.corpus.tokenizer.encode(self.asked["sample"]["prompt"])  # it is sampled from after training
        build_optimiser(self.asked["optim"], self.model)
        _ = self.compiled

    @cached_property
    def corpus(self) -> Corpus:
        """The prepared text and its tokenizer."""
        return build_corpus(self.asked["data"], self.asked["tokenizer"], self.asked["cache_dir"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, with a number where it had trainer.micro_batch_tokens=auto."""
        if self.asked["trainer"]["micro_batch_tokens"] != "auto":
            return self.asked
        return with_micro_batch(self.asked, self.corpus.tokenizer.vocab_size, self.accelerator, self.precision)

    @cached_property
    def plan(self) -> BatchPlan:
        """How an optimiser step is cut into micro-batches."""
        return plan_run(self.config)[0]

    @cached_property
    def steps(self) -> int:
        """The number of optimiser steps."""
        return plan_run(self.config)[1]

    @cached_property
    def data(self) -> LMDataModule:
        """The batches."""
        refuse_shared_stream(self.corpus, self.plan.processes)
        options = {key: self.config["data"][key] for key in ("mask_documents", "packing", "eval_tokens")}
        return LMDataModule(
            self.corpus, context=self.plan.context, micro_batch=self.plan.micro, seed=self.config["seed"], **options
        )

    @cached_property
    def model(self) -> GPT:
        """The model with fresh weights, or with those of `init_from`."""
        torch.manual_seed(self.config["seed"])
        model = build_model(self.config, self.corpus.tokenizer.vocab_size)
        warn_about_blind_blocks(model)
        warn_about_idle_settings(model, self.config["block"])
        if self.config.get("init_from"):
            start_from(model, self.config["init_from"])
        return model

    @cached_property
    def schedule(self) -> Schedule:
        """The learning rate over the tokens."""
        plan, steps = plan_run(self.asked)
        return build_schedule(self.asked["schedule"], steps * plan.tokens)

    @cached_property
    def accelerator(self) -> str:
        """cpu, cuda or mps."""
        return choose_accelerator(self.asked["trainer"]["accelerator"])

    @property
    def precision(self) -> str:
        """Lightning's name of the number format."""
        return self._precision.value

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles the loss."""
        return self._compiled.value == "yes"

    @property
    def reasons(self) -> dict[str, str]:
        """Why precision and compiling were chosen, where `auto` chose them."""
        chosen = {"precision": self._precision, "compile": self._compiled}
        return {name: choice.why for name, choice in chosen.items() if choice.why != ASKED}

    @cached_property
    def _precision(self) -> Choice:
        return choose_precision(self.asked["trainer"]["precision"], self.accelerator)

    @cached_property
    def _compiled(self) -> Choice:
        flops = self.model.flops_per_token(self.plan.context) * self.plan.tokens / self.plan.processes
        block = self.config["choices"]["block"]
        return choose_compile(self.config["trainer"]["compile"], self.accelerator, block, flops, self.steps)


def build_job(config: dict[str, Any]) -> Job:
    """The job of a resolved configuration, not checked yet."""
    return Job(config)


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
