"""A composed configuration, checked against the schema: types, ranges, words, and what must fit together."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import fields
from typing import Any

from polarlm.block_keys import (
    PARTS,
    SYMBOLS,
    flat_block,
    is_parted,
    part_choices,
    part_settings,
    users_of,
)
from polarlm.data.config import DataConfig, read_data_config
from polarlm.errors import UserError, did_you_mean
from polarlm.launch.schema import (
    OPEN_GROUPS,
    SECTIONED_GROUPS,
    BlockSettings,
    EvalSettings,
    TrainSettings,
    group_schemas,
)
from polarlm.locations import choices_of
from polarlm.model.config import GPTConfig
from polarlm.part_rules import refuse_contradictions
from polarlm.settings import check_value, checked_value, plain_settings

PER_HEAD = {f.name for f in fields(BlockSettings) if "PerHead" in str(f.type)}
LEAST_TEMPERATURE = 1e-3  # logits divided by less are no numbers


def check_train(config: dict[str, Any], shipped: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration with every value of the right type, or a UserError about the first wrong one.

    `shipped` is what the chosen files say without further overrides; with it, a key of a block that was added by hand
    is refused. Keys at the top that we do not know are kept with a warning: a user's own notes.
    """
    schemas = group_schemas()
    top_level = {f.name for f in fields(TrainSettings)}
    missing = [group for group in (*schemas, *OPEN_GROUPS, "model") if group not in config]
    if missing:
        raise UserError(f"{missing[0]} must be given: choose one with {missing[0]}=….")
    checked = plain_settings(TrainSettings, {key: value for key, value in config.items() if key in top_level}, "")
    checked["model"] = check_model(config["model"])
    for group, schema in schemas.items():
        checked[group] = plain_settings(schema, config[group], group)
    for group in OPEN_GROUPS:
        checked[group] = check_open(group, config[group], (shipped or config)[group], OPEN_GROUPS[group])
    if is_parted(checked["block"]):
        check_fitting(checked["block"])
        check_used(checked["block"], (shipped or config)["block"])
    for group, schema in SECTIONED_GROUPS.items():
        checked[group] = check_sections(group, config.get(group) or {}, (shipped or config).get(group) or {}, schema)
    for key in config.keys() - checked.keys() - {"choices"}:
        warnings.warn(f"The setting '{key}' is not known to polarlm and has no effect", stacklevel=2)
    check_relations(checked)
    return {key: checked.get(key, value) for key, value in config.items()}


def check_model(model: Any) -> dict[str, Any]:
    """A model's size; the vocabulary is the tokenizer's, so it is not a setting."""
    if isinstance(model, dict):
        if "vocab_size" in model:
            raise UserError("model.vocab_size is not an option: the tokenizer decides it (tokenizer.vocab_size=…).")
        model = {**model, "vocab_size": 1}
    checked = plain_settings(GPTConfig, model, "model")
    del checked["vocab_size"]
    return checked


def check_eval(config: dict[str, Any], shipped: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same for eval.yaml, which may name another corpus."""
    checked = plain_settings(EvalSettings, {key: value for key, value in config.items() if key != "data"}, "")
    data = config.get("data")
    return checked if data is None else {**checked, "data": plain_settings(DataConfig, data, "data")}


def check_sections(group: str, given: Any, shipped: dict[str, Any], schema: type) -> dict[str, Any]:
    """A group of which several may be chosen: a section per choice, each naming a class."""
    if not isinstance(given, dict):
        raise UserError(f"{group}={given!r} must be a choice, or several: {group}=[{', '.join(choices_of(group)[:2])}]")
    checked = {}
    for name, section in given.items():
        if name not in shipped:
            raise UserError(f"{group}.{name} is not chosen. {did_you_mean(name, shipped)}Add it with {group}=[…]")
        checked[name] = check_open(f"{group}.{name}", section, shipped[name], schema)
    return checked


def check_open(group: str, given: Any, shipped: dict[str, Any], schema: type) -> dict[str, Any]:
    """A group that names a class: known keys by the group's schema, others by the type of their default in the yaml.

    So a new block, optimiser or schedule is a Python file and a yaml; its class checks what its schema does not know.
    """
    if not isinstance(given, dict) or "_target_" not in given:
        raise UserError(f"{group} must name a class as its _target_; choose one with {group}=…")
    checked: dict[str, Any] = {}
    # A symbol before the parts that take it: a wrong value is named as it was typed.
    for key, value in sorted(given.items(), key=lambda item: isinstance(item[1], dict)):
        part = shipped.get(key)
        if group == "block" and isinstance(part, dict) and "kind" in part:
            checked[key] = check_part(key, value, part)
        else:
            checked[key] = check_key(group, key, value, shipped, schema)
    return checked


def check_part(part: str, given: Any, shipped: dict[str, Any]) -> dict[str, Any]:
    """A part of a block: its choice is made by name, its settings are known or like their defaults."""
    if not isinstance(given, dict) or given.get("kind") != shipped["kind"]:
        choices = ", ".join(part_choices(part))
        raise UserError(f"block.{part} is a part of the block: choose one with block/{part}=…, among {choices}.")
    return {key: check_key(f"block.{part}", key, value, shipped, BlockSettings) for key, value in given.items()}


def check_key(group: str, key: str, value: Any, shipped: dict[str, Any], schema: type) -> Any:
    """A setting that the shipped yaml has: by the schema where it is known there, else of the default's type."""
    name, default = f"{group}.{key}", shipped.get(key)
    if key not in shipped:
        names = [f"{group}.{other}" for other in shipped if not other.startswith("_") and other != "kind"]
        raise UserError(f"{name} is not an option. {did_you_mean(name, names)}".strip())
    if key == "_target_" and value != default:
        raise UserError(f"{name}={value!r} can't be typed: a class is chosen by the name of its yaml.")
    if key in {f.name for f in fields(schema)}:
        return check_value(schema, key, value, group)
    # A default of null or a list says nothing about the type.
    return checked_value(type(default), value, name) if isinstance(default, (bool, int, float, str)) else value


def check_used(given: dict[str, Any], shipped: dict[str, Any]) -> None:
    """Refuse a symbol that was given although no chosen part uses it."""
    kinds = {(part, given[part]["kind"]) for part in PARTS}
    for symbol in SYMBOLS:
        users = users_of(symbol)
        if given.get(symbol) != shipped.get(symbol) and not kinds & set(users):
            raise UserError(
                f"block.{symbol}={given[symbol]} has no effect: no part of this block uses it. It needs "
                f"{' or '.join(f'block/{part}={choice}' for part, choice in users)}."
            )


def check_fitting(block: dict[str, Any]) -> None:
    """Refuse parts that contradict each other, and unknown names of frozen parameters."""
    refuse_contradictions(flat_block(block))
    kind, radial, aggregate = {part: block[part]["kind"] for part in PARTS}, block["radial"], block["aggregate"]
    shared = [key for key in aggregate if key != "kind" and kind["radial"] != "none" and key in radial]
    for key in shared if kind["aggregate"] != "mean" else ():
        if aggregate[key] != radial[key]:
            raise UserError(
                f"block.aggregate.{key}={aggregate[key]} and block.radial.{key}={radial[key]} are one number of the "
                f"block; set block.radial.{key} alone."
            )
    known = {key for part in PARTS for choice in part_choices(part) for key in part_settings(part, choice)}
    for name in block["frozen"]:
        if name not in known:
            raise UserError(f"block.frozen names '{name}'. {did_you_mean(name, sorted(known))}".strip())


def check_choice(key: str, name: str, group: str) -> None:
    """A setting that names a choice of a group."""
    names = choices_of(group)
    if name not in names:
        raise UserError(f"{key}={name} does not exist. {did_you_mean(name, names)}Choices: {', '.join(names)}")


def require_memory(config: dict[str, Any]) -> None:
    """Refuse a model whose training step this machine cannot hold, before anything of it is built."""
    from polarlm.data.atomic import machine_memory, megabytes
    from polarlm.training.batching import plan_run

    trainer, memory = config["trainer"], machine_memory()
    size = GPTConfig(vocab_size=config["tokenizer"].get("vocab_size") or 1, **config["model"])
    accelerated = trainer["accelerator"] in ("gpu", "cuda", "mps") or sys.platform != "linux"
    accelerated |= trainer["accelerator"] == "auto" and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
    needed = 4 * size.least_parameters()  # the weights; they are made here wherever they go
    if not accelerated:  # gradients, two moments, and what the forward pass keeps
        kept = 1 if size.checkpointing else size.n_layer
        plan = plan_run(config)[0]
        needed = 4 * needed + 4 * plan.micro * plan.context * kept * size.channels_per_layer()
    if memory is not None and needed > memory:
        raise UserError(
            f"The model needs at least {megabytes(needed)} of memory, this machine has {megabytes(memory)}; choose a "
            "smaller model.d_model, model.n_layer, model.n_head, model.head_dim, model.ffn_mult, model.ffn_width or "
            "trainer.micro_batch_tokens"
        )


def check_relations(config: dict[str, Any]) -> None:
    """What must fit together: head sizes, batch and context, warm-up and length, splits."""
    from polarlm.data.tokenizer import read_tokenizer_config
    from polarlm.training.batching import plan_run
    from polarlm.training.schedules import build_schedule

    trainer = config["trainer"]
    check_choice("match_block", config.get("match_block", "standard"), "block")
    if trainer["strategy"] == "fsdp" and trainer["precision"] in ("16-mixed", "64-true"):  # not in Lightning
        raise UserError(
            f"trainer.precision={trainer['precision']} does not work with trainer.strategy=fsdp; "
            "allowed there: auto, 32-true, bf16-mixed, bf16-true."
        )
    GPTConfig(vocab_size=1, **config["model"])
    if (decay := config["optim"].get("lr", 0) * config["optim"].get("weight_decay", 0)) > 1:
        raise UserError(
            f"optim.lr × optim.weight_decay is {decay:g}, so that weights would change their sign in every step; "
            "choose a product of at most 1."
        )
    if 0 < config["sample"]["temperature"] < LEAST_TEMPERATURE:
        raise UserError(
            f"sample.temperature={config['sample']['temperature']} must be 0 (the most likely token) or at least "
            f"{LEAST_TEMPERATURE}."
        )
    block, context = config["block"], config["model"]["context"]
    if str(block["_target_"]).endswith(".XPosAttention") and 64 * block["scale"] < context:
        raise UserError(
            f"block.scale={block['scale']} with model.context={context}: the factors of xPos leave fp32; choose a "
            f"block.scale of at least {context / 64:g}."
        )
    heads = config["model"]["n_head"]
    parts = {"block": block} | {f"block.{name}": part for name, part in block.items() if isinstance(part, dict)}
    for name, key, value in ((name, key, value) for name, part in parts.items() for key, value in part.items()):
        if key in PER_HEAD and isinstance(value, list) and len(value) not in (1, heads):
            raise UserError(f"{name}.{key} has {len(value)} values; give one number, or one per head ({heads}).")
    plan, steps = plan_run(config)
    build_schedule(config["schedule"], steps * plan.tokens)
    limit = read_data_config(config["data"]).max_bytes
    if limit is not None and limit <= context:
        raise UserError(
            f"data.max_bytes={limit} is not enough text for model.context={context}; give more bytes than the context "
            "has tokens, or a smaller model.context."
        )
    read_tokenizer_config(config["tokenizer"])
