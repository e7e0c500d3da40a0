"""`polarlm inspect`: what a run's model is, or (`--plan`) what a run that does not exist would need."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from polarlm.errors import UserError, did_you_mean
from polarlm.runs import commands as runs


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    p = verbs.add_parser(
        "inspect",
        help="what a run's model is made of, costs and has learned; or what a planned run would need",
        description="Parameters per part, FLOPs per token, memory of a step, learned scalars, changed settings. "
        "With --plan: memory, communication and time of a run on GPUs that need not be here, for example "
        "polarlm inspect --plan gpus=8 gpu=h100 experiment=gpt2_124m",
    )
    p.add_argument("folder", metavar="run", nargs="?", help=runs.RUN)
    p.add_argument(
        "--plan",
        nargs="+",
        metavar="key=value",
        help="gpus=, gpu=, and if you like per_node= (8), mfu= (0.4), vocab=; then any setting of train.py",
    )
    p.set_defaults(run=inspect)


def inspect(options: argparse.Namespace) -> int:
    """Print the description, or the plan."""
    if (options.folder is None) == (options.plan is None):
        raise UserError(
            "inspect takes either a run folder (inspect runs/NAME) or a plan "
            "(inspect --plan gpus=8 gpu=h100 experiment=gpt2_124m)"
        )
    if options.plan is None:
        return runs.print_description(options)
    print(plan_text(options.plan))
    return 0


def plan_text(arguments: list[str]) -> str:
    """The plan for `gpus=… gpu=…` and the settings of a run."""
    from polarlm.launch.overrides import config_loader, plan_jobs
    from polarlm.settings import read_settings
    from polarlm.training.planning.gpus import GPUS, PlanSettings

    plan_keys = {f.name for f in fields(PlanSettings)}
    given: dict[str, Any] = {}
    overrides = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if key in plan_keys and equals:
            given[key] = _number(value)
        else:
            overrides.append(text)
    for key, example in (("gpus", "gpus=8"), ("gpu", "gpu=h100")):
        if key not in given:
            raise UserError(f"{key}=… is missing: a plan needs it, for example {example} (GPUs: {', '.join(GPUS)})")
    if given["gpu"] not in GPUS:
        near = did_you_mean(str(given["gpu"]), GPUS)
        raise UserError(f"gpu={given['gpu']} is not known. {near}Choices: {', '.join(GPUS)}")
    settings = read_settings(PlanSettings, given, "")
    devices = min(settings.per_node, settings.gpus)
    if settings.gpus % devices:
        raise UserError(f"gpus={settings.gpus} does not fill nodes of per_node={devices}; choose a multiple of it.")
    place = [f"trainer.devices={devices}", f"trainer.nodes={settings.gpus // devices}"]
    job = plan_jobs(config_loader(), "train", [*overrides, *place], multirun=False).jobs[0]
    assert job.config is not None
    from polarlm.training.planning.plan import make_plan
    from polarlm.training.planning.text import describe_plan

    return describe_plan(make_plan(job.config, settings))


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
