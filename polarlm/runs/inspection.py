"""What a run's model is made of, what it costs, what its scalars have become, and which settings were changed."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from polarlm.locations import CONFIGS
from polarlm.model import GPT
from polarlm.printing import indented
from polarlm.runs.identity import flatten
from polarlm.runs.restore import RestoredRun

PARTS = {"embedding": "embedding", "head": "output", "mixer": "attention", "feed_forward": "feed-forward"}
OPTIMISER_BYTES = 8  # AdamW's two moments, fp32
MEASURED_LENGTH, MEASURED_TOKENS = 2048, 16384


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


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


# -- the settings that train.py would take by itself, and those of a run's own choices --------------------------------


def default_settings(choices: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings without any choice, settings with these choices), both with the names chosen in every group.

    A name that is no file (a size changed by hand is called 2x32) leaves that group at its default.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    def plain(overrides: list[str]) -> dict[str, Any]:
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
        names = cfg.hydra.runtime.choices.items()
        picked = {k: v for k, v in names if "hydra" not in k and "/" not in k and v is not None}
        ours = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        return {**OmegaConf.to_container(ours, resolve=True), "choices": picked}  # type: ignore[dict-item]

    world = GlobalHydra.instance()
    running, world.hydra = world.hydra, None
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            default = plain([])
            known = [
                f"{group}={name}"
                for group, name in choices.items()
                if group in default["choices"] and is_choice(group, name)
            ]
            return default, plain(known)
    finally:
        world.hydra = running


def is_choice(group: str, name: Any) -> bool:
    """Whether a yaml of ours has this name; a stored name must not lead to another folder's."""
    # os.path.isfile is False for a name that is too long; Path.exists raises.
    return re.fullmatch(r"[\w-]+", str(name)) is not None and os.path.isfile(CONFIGS / group / f"{name}.yaml")
