"""`polarlm inspect`: what a run's model is made of, costs and has learned; or what a planned run would need."""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from polarlm.errors import UserError, did_you_mean
from polarlm.launch.commands import RUN
from polarlm.launch.overrides import compose, config_loader, named_choices, plan_jobs
from polarlm.locations import choices_of
from polarlm.printing import indented
from polarlm.runs.identity import flatten
from polarlm.settings import read_settings

if TYPE_CHECKING:
    from torch import Tensor

    from polarlm.model import GPT
    from polarlm.runs.restore import RestoredRun

PARTS = {"embedding": "embedding", "head": "output", "mixer": "attention", "feed_forward": "feed-forward"}
OPTIMISER_BYTES = 8  # AdamW's two moments, fp32
MEASURED_LENGTH, MEASURED_TOKENS = 2048, 16384


def add_parser(verbs: Any) -> None:
    """Add `polarlm inspect`."""
    p = verbs.add_parser(
        "inspect",
        help="show parameters, cost and learned scalars of a run, or plan a run",
        description="Parameters per part, FLOPs per token, memory of a step, learned scalars, changed settings. "
        "With --plan: memory, communication and time of a run on GPUs that need not be here, for example "
        "polarlm inspect --plan gpus=8 gpu=h100 experiment=gpt2_124m",
    )
    p.add_argument("folder", metavar="run", nargs="?", help=RUN)
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
    if options.plan is not None:
        print(plan_text(options.plan))
        return 0
    from polarlm.runs.restore import restore_run

    print(describe_run(restore_run(options.folder, "cpu")))
    return 0


def describe_run(run: RestoredRun) -> str:
    """The whole description as text."""
    model, context = run.model, run.model.config.context
    lines = [f"{run.folder}  ({run.weights.name})", "", "Parameters"]
    lines += indented([(name, f"{count:,}", f"{share:.1%}") for name, count, share in parameter_parts(model)])
    lines += ["", f"FLOPs per token (training, context {context:,}; forward is a third of it)"]
    lines += indented([(name, f"{flops:,}") for name, flops in flops_parts(model, context)])
    # Measured with a forward pass, so no larger than any machine can do: a stranger may have written any size.
    length = min(context, MEASURED_LENGTH)
    given = run.config["trainer"].get("micro_batch_tokens")
    rows = max(1, (min(given, MEASURED_TOKENS) if isinstance(given, int) else MEASURED_TOKENS) // length)
    lines += ["", f"Memory of a training step in fp32 (micro-batch of {rows} × {length:,} tokens)"]
    lines += indented([(name, _bytes(size)) for name, size in memory_parts(model, rows, length)])
    scalars = learned_scalars(model)
    if scalars:
        lines += ["", "Learned scalars (a row per layer; a number per head, or one for all)"]
        for name, layers in scalars.items():
            lines.append(f"  {name}")
            lines += [f"    layer {n}  " + "  ".join(f"{x:.4g}" for x in values) for n, values in enumerate(layers)]
    lines += ["", "Settings that differ from the default"]
    changed = changed_settings(run.config)
    lines += indented([(key, f"{old} → {new}") for key, old, new in changed]) if changed else ["  none"]
    return "\n".join(lines)


def parameter_parts(model: GPT) -> list[tuple[str, int, float]]:
    """(part, parameters, share): embedding, attention, feed-forward, norms, the filter's scalars, output if untied."""
    counts: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        words = name.split(".")
        part = next((title for word, title in PARTS.items() if word in words), "norms")
        if any("norm" in word for word in words):
            part = "norms"
        if "estimator" in words:
            part = "scalars of the filter"
        counts[part] += parameter.numel()
    total = model.parameter_count()
    order = ["embedding", "attention", "scalars of the filter", "feed-forward", "norms", "output"]
    parts = [(part, counts[part], counts[part] / total) for part in order if counts[part]]
    return [*parts, ("total", total, 1.0)]


def flops_parts(model: GPT, context: int) -> list[tuple[str, int]]:
    """(part, training FLOPs per token); the parts add up to what `flops_per_token` says."""
    attention = 3 * sum(block.mixer.flops_per_token(context) for block in model.blocks)  # type: ignore[operator, union-attr]
    output = 3 * 2 * model.head.weight.numel()
    total = model.flops_per_token(context)
    return [
        ("attention", int(attention)),
        ("feed-forward", int(total - attention - output)),
        ("output", int(output)),
        ("total", total),
    ]


def memory_parts(model: GPT, rows: int, length: int) -> list[tuple[str, int]]:
    """(what, bytes): weights, gradients, AdamW's moments, and what one forward pass keeps for its backward pass."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    elements = model.parameter_count()
    kept = saved_bytes(model, rows, length)
    parts = [("weights", parameters), ("gradients", parameters), ("optimiser", OPTIMISER_BYTES * elements)]
    parts.append(("activations", kept))
    return [*parts, ("total", sum(size for _, size in parts))]


def saved_bytes(model: GPT, rows: int, length: int) -> int:
    """Bytes that autograd holds after a forward pass: every storage once, weights not counted."""
    import torch

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address could be given to another tensor

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.zeros(rows, length, dtype=torch.long, device=model.embedding.weight.device)
    training = model.training
    model.train()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(tokens, tokens)
        del loss
    finally:
        model.train(training)
    return sum(seen.values())


def learned_scalars(model: GPT) -> dict[str, list[list[float]]]:
    """{name: [layer][head]} of ν, η, σ, μ, m∞, α, β … and b of forgetting, of the blocks that have them."""
    scalars: dict[str, list[list[float]]] = {}
    for block in model.blocks:
        estimator: Any = getattr(block.mixer, "estimator", None)
        if estimator is not None:
            for name, value in estimator.read().items():
                scalars.setdefault(name, []).append(value.detach().reshape(-1).tolist())
        forget: Any = getattr(block.mixer, "forget", None)
        if forget is not None:
            scalars.setdefault("forget_bias", []).append(forget.offset.detach().tolist())
    return scalars


def changed_settings(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, default, this run's) of every setting that is not what train.py would take by itself.

    A chosen group (block=polar) is one difference; below it only what differs from that group's own yaml.
    """
    default, chosen = default_settings(config.get("choices") or {})
    changed = [
        (group, default["choices"].get(group), name)
        for group, name in (config.get("choices") or {}).items()
        if default["choices"].get(group) != name
    ]
    ours, theirs = dict(flatten(config)), dict(flatten(chosen))
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key] and not key.startswith(("choices", "name", "group")):
            changed.append((key, theirs[key], ours[key]))
    return changed


def default_settings(choices: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings without any choice, settings with these choices), both with the names chosen in every group.

    A name that is no file (a size changed by hand is called 2x32) leaves that group at its default.
    """

    def plain(overrides: list[str]) -> dict[str, Any]:
        cfg = compose(config_loader(), "train", overrides)
        ours = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        picked = named_choices(cfg.hydra.runtime.choices)
        return {**OmegaConf.to_container(ours, resolve=True), "choices": picked}  # type: ignore[dict-item]

    default = plain([])
    known = {group: name for group, name in choices.items() if group in default["choices"]}
    return default, plain([f"{group}={name}" for group, name in known.items() if name in choices_of(group)])


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


# -- a run that does not exist yet ------------------------------------------------------------------------------------


def plan_text(arguments: list[str]) -> str:
    """The plan for `gpus=… gpu=…` and the settings of a run."""
    from polarlm.training.gpus import GPUS, PlanSettings

    plan_keys = {f.name for f in dataclasses.fields(PlanSettings)}
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
    from polarlm.training.plan import describe_plan, make_plan

    return describe_plan(make_plan(job.config, settings))


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
