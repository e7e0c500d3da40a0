"""A composed configuration, checked against the schema: types, ranges, words, and what must fit together."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

from polarlm.data.config import DataConfig, read_data_config
from polarlm.errors import UserError, did_you_mean
from polarlm.launch.schema import OPEN_GROUPS, EvalSettings, TrainSettings, group_schemas
from polarlm.locations import choices_of
from polarlm.model.config import GPTConfig
from polarlm.settings import check_value, plain_settings


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
        checked[group] = check_open(group, config[group], (shipped or config)[group])
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


def check_open(group: str, given: Any, shipped: dict[str, Any]) -> dict[str, Any]:
    """A group that names a class: known keys by the group's schema, others by the type of their default in the yaml.

    So a new block, optimiser or schedule is a Python file and a yaml; its class checks what its schema does not know.
    """
    if not isinstance(given, dict) or "_target_" not in given:
        raise UserError(f"{group} must name a class as its _target_; choose one with {group}=…")
    schema = OPEN_GROUPS[group]
    known = {f.name for f in fields(schema)}
    checked = {}
    for key, value in given.items():
        if key not in shipped:
            names = [f"{group}.{name}" for name in shipped if not name.startswith("_")]
            raise UserError(f"{group}.{key} is not an option. {did_you_mean(f'{group}.{key}', names)}".strip())
        if key in known:
            checked[key] = check_value(schema, key, value, group)
        else:
            checked[key] = _like(f"{group}.{key}", value, shipped[key])
    return checked


def check_choice(key: str, name: str, group: str) -> None:
    """A setting that names a choice of a group."""
    names = choices_of(group)
    if name not in names:
        raise UserError(f"{key}={name} does not exist. {did_you_mean(name, names)}Choices: {', '.join(names)}")


def _like(key: str, value: Any, default: Any) -> Any:
    """A value of the same type as its default; a default of null or a list says nothing about it."""
    if isinstance(default, bool):
        right, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, (int, float)):
        right = isinstance(value, type(default) | int) and not isinstance(value, bool)
        wanted = "a whole number" if isinstance(default, int) else "a number"
    else:
        right, wanted = not isinstance(default, str) or isinstance(value, str), "text"
    if not right:
        raise UserError(f"{key}={value!r} must be {wanted}.")
    return value


def check_relations(config: dict[str, Any]) -> None:
    """What must fit together: head sizes, batch and context, warm-up and length, splits."""
    from polarlm.data.tokenizers.config import read_tokenizer_config
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
    plan, steps = plan_run(config)
    build_schedule(config["schedule"], steps * plan.tokens)
    read_data_config(config["data"])
    read_tokenizer_config(config["tokenizer"])
