"""Every shipped choice composes, and what it composes to can be built."""

import inspect
from dataclasses import MISSING, fields
from importlib import import_module

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from polarlm.data.config import DataConfig, SplitConfig
from polarlm.launch.check import check_train
from polarlm.locations import CONFIGS, shipped_settings
from polarlm.model import GPTConfig
from polarlm.training.batching import plan_batches, total_steps
from polarlm.training.schedules import build_schedule

GROUPS = ("model", "data", "tokenizer", "optim", "schedule", "trainer", "logger", "callbacks", "diagnostics", "recipe")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True)


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in choices(group)])
def test_a_choice_composes_and_describes_a_possible_run(choice):
    config = composed(choice)
    GPTConfig(vocab_size=256, **config["model"])
    context, trainer = config["model"]["context"], config["trainer"]
    batch = trainer["batch_tokens"] if choice.split("=")[0] != "model" else context * 8
    plan = plan_batches(batch, context, trainer["devices"] * trainer["nodes"], trainer["micro_batch_tokens"])
    total = plan.tokens * total_steps(trainer["max_steps"], trainer["max_tokens"], plan.tokens)
    assert 0 < build_schedule(config["schedule"], total).factor(total // 2, total) <= 1
    assert float(config["optim"]["lr"]) > 0


@pytest.mark.parametrize("name", choices("experiment"))
def test_an_experiment_names_existing_choices_and_a_batch_that_can_be_cut(name):
    config = composed(f"experiment={name}")
    trainer = config["trainer"]
    assert (
        plan_batches(trainer["batch_tokens"], config["model"]["context"], 1, trainer["micro_batch_tokens"]).tokens
        == trainer["batch_tokens"]
    )
    assert name in (CONFIGS / "experiment" / f"{name}.yaml").read_text()  # the header shows the command


def test_the_help_is_written_for_people():
    import subprocess
    import sys

    out = subprocess.run(
        [sys.executable, "train.py", "--help"], capture_output=True, text=True, cwd=CONFIGS.parent
    ).stdout
    for text in ("block: ", "polar", "trainer.max_steps", "Examples", "python train.py -m", "--cfg job", "launcher: "):
        assert text in out
    assert "study: " not in out and "data/common" not in out  # cannot be chosen here


def test_the_help_names_the_command_that_was_typed(monkeypatch, capsys):
    from polarlm import cli

    monkeypatch.setattr("sys.argv", ["/usr/bin/polarlm", "train", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("train", "eval"):
        cli.main([verb, "--help"])
        out = capsys.readouterr().out
        assert f"polarlm {verb} " in out and ".py" not in out  # an installed package has no train.py
        choices = out[out.index("  block: " if verb == "train" else "  data: ") :].split("\n\n")[0]
        assert max(map(len, choices.splitlines())) <= 80


def test_the_help_lists_the_papers_blocks_before_baselines_and_others():
    from polarlm.launch.entry import help_text
    from polarlm.launch.overrides import config_loader

    blocks = help_text(config_loader(), "train").partition("  block: ")[2].partition("\n  callbacks: ")[0].split()
    heads = [blocks.index(word) for word in ("baselines:", "others:")]
    names = [word.rstrip(",") for word in blocks]
    assert names[: heads[0]] == ["polar", "polar_literal", "polar_paper"]
    assert {"standard", "xsa_strong"} <= set(names[heads[0] : heads[1]])
    assert sorted({*names} - {"baselines:", "others:"}) == choices("block")


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in (*GROUPS, "block") for name in choices(group)])
def test_every_shipped_setting_has_a_rule_and_keeps_its_value(choice):
    """A new key of a group needs a line in its schema: launch/schema.py, data/config.py, model/config.py."""
    # A mixture alone is refused: its parts are chosen with it.
    parts = ("+data@data.parts.code=pydocs", "++data.weights={code:1}") if choice == "data=mixture" else ()
    config = composed(choice, *parts)
    if choice.startswith("model="):
        config["trainer"]["batch_tokens"] = 8 * config["model"]["context"]
    config["cache_dir"] = "cache"
    assert check_train(config) == config


def test_a_default_that_stands_in_a_class_too_is_the_same_there():
    def differing(schema: type, *sources: dict) -> dict:
        defaults = {f.name: f.default for f in fields(schema) if f.default is not MISSING}
        return {
            key: (value, defaults[key])
            for source in sources
            for key, value in source.items()
            if key in defaults and value != defaults[key]
        }

    base = OmegaConf.to_container(OmegaConf.load(CONFIGS / "data" / "common" / "base.yaml"))
    split = base.pop("split")
    sizes = ("context", "d_model", "n_layer", "n_head")  # these have no default in the class
    assert differing(GPTConfig, {k: v for k, v in composed()["model"].items() if k not in sizes}) == {}
    assert differing(DataConfig, base) == {}
    assert differing(SplitConfig, split) == {}


@pytest.mark.parametrize("group", ["block", "optim", "schedule"])
def test_the_yaml_that_is_named_after_a_class_or_its_file_has_the_defaults_of_the_class(group):
    """So that a notebook, which has no yaml, builds what the command line builds."""
    compared = 0
    for choice in choices(group):
        settings = shipped_settings(group, choice)
        home, _, name = settings["_target_"].rpartition(".")
        target = getattr(import_module(home), name)
        initials = "".join(letter for letter in name if letter.isupper())
        if choice not in (inspect.getmodule(target).__name__.rpartition(".")[2], name.lower(), initials.lower()):
            continue  # a variant: what differs is its subject
        defaults = {}
        for function in [target, *getattr(target, "__mro__", ())[1:-1]]:  # **options are those of the class it extends
            parameters = inspect.signature(function).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | defaults
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                break
        both = settings.keys() & defaults.keys()
        plain = {key: list(d) if isinstance(d, tuple) else d for key, d in defaults.items()}
        shipped = {key: settings[key] for key in both}  # of a block's part its choice
        shipped = {k: v["kind"] if isinstance(v, dict) and "kind" in v else v for k, v in shipped.items()}
        assert shipped == {key: plain[key] for key in both}, f"{group}={choice}"
        compared += len(both)
    assert compared
