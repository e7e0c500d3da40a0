"""What a person typed, checked before Hydra composes it: every choice and key exists, or the nearest one is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.errors import UserError, did_you_mean
from polarlm.launch.plugins import register_plugins
from polarlm.locations import CONFIGS


@dataclass(frozen=True)
class Plan:
    """The jobs that a command line asks for: one list of overrides each."""

    multirun: bool
    overrides: list[str]  # as Hydra wants them
    jobs: list[list[str]]
    varied: list[str]  # the keys that differ between the jobs


def config_loader() -> Any:
    """Hydra's loader over our configs (and the user's own), with Hydra left as it was found."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_plugins()
    world = GlobalHydra.instance()
    running, world.hydra = world.hydra, None
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3", job_name="polarlm"):
            return world.config_loader()
    finally:
        world.hydra = running


def plan_jobs(loader: Any, config_name: str, overrides: Sequence[str], *, multirun: bool) -> Plan:
    """Check every override and expand the sweep; a wrong one is a UserError that names the nearest right one."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.types import RunMode

    groups = dict(compose(loader, config_name, []).hydra.runtime.choices)
    # `+sweep=nu` asks for what `sweep=nu` asks for; Hydra itself would refuse the + of a group it knows.
    overrides = [
        text[1:] if text.startswith("+") and text[1:].partition("=")[0] in groups else text for text in overrides
    ]
    parsed = [_parse(loader, text) for text in overrides]
    for override in parsed:
        _check_choice(loader, config_name, groups, override)
    named = [o.input_line for o in parsed if o.key_or_group in groups and not o.is_sweep_override()]
    hydra = compose(loader, config_name, named).hydra
    params = [_parse(loader, f"{key}={value}") for key, value in (hydra.sweeper.get("params") or {}).items()]
    for override in params:
        _check_choice(loader, config_name, groups, override)
    multirun = multirun or hydra.mode == RunMode.MULTIRUN
    several = next((o for o in parsed if o.is_sweep_override()), None)
    if several is not None and not multirun:
        raise UserError(
            f"{several.input_line} names several values; add -m to train every combination, "
            f"or write {several.key_or_group}=[…] for a list"
        )
    endless = next((o for o in (*params, *parsed) if o.is_interval_sweep()), None)
    if endless is not None:
        raise UserError(f"{endless.input_line} is an interval, which has no end of values; list them: a,b,c")
    everything = [o for o in (*params, *parsed) if not o.is_hydra_override()]
    own = [o.input_line for o in parsed if o.is_hydra_override()]
    jobs = BasicSweeper.split_arguments(everything, None)[0] if multirun else [[o.input_line for o in everything]]
    _check_keys(loader, config_name, groups, [[*own, *job] for job in jobs])
    varied = list(dict.fromkeys(o.key_or_group for o in everything if o.is_sweep_override()))
    return Plan(multirun, overrides, jobs, varied)


def compose(loader: Any, config_name: str, overrides: Sequence[str]) -> Any:
    """The configuration that Hydra composes for one run, with its own node `hydra`."""
    from hydra.types import RunMode

    return loader.load_configuration(config_name, list(overrides), run_mode=RunMode.RUN)


def flat_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """The dotted name of every node, inner ones too."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{key}"
        yield from flat_keys(value, f"{prefix}{key}.")


def _parse(loader: Any, text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except OverrideParseException as error:
        hint = "write key=value" if "=" not in text else "quote values with special characters: key='…'"
        raise UserError(f"'{text}' can't be read as a setting; {hint}") from error


def _check_choice(loader: Any, config_name: str, groups: dict[str, Any], override: Any) -> None:
    """A group override names files that exist."""
    name = override.key_or_group
    if name not in groups:
        if "." not in name and "/" not in name and name in loader.list_groups("") and not override.is_add():
            raise UserError(
                f"{config_name}.py has no '{name}': a run is judged on what it was trained with. "
                f"Train another run for another {name}, or see python {config_name}.py --help"
            )
        return
    if override.is_delete():
        raise UserError(f"'{override.input_line}': every run needs a {name}; choose one with {name}=…")
    options = loader.get_group_options(name)
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    for value in values:
        if str(value) not in options:
            raise UserError(
                f"{name}={value} does not exist. {did_you_mean(str(value), options)}Choices: {', '.join(options)}"
            )


def _check_keys(loader: Any, config_name: str, groups: dict[str, Any], jobs: list[list[str]]) -> None:
    """Every key of every job exists in the configuration that the job's own choices make."""
    known: dict[tuple[str, ...], list[str]] = {}
    for job in jobs:
        overrides = [_parse(loader, text) for text in job]
        choices = tuple(o.input_line for o in overrides if o.key_or_group in groups)
        if choices not in known:
            known[choices] = list(flat_keys(_plain(compose(loader, config_name, choices))))
        keys = known[choices]
        for override in overrides:
            name = override.key_or_group
            if name in groups or "/" in name:
                continue
            exists = name in keys or _is_list_place(name, keys)
            if override.is_add() and not override.is_force_add() and exists:
                raise UserError(f"'{name}' exists already; write {name}=… without the +")
            if not override.is_add() and not exists:
                own = [key for key in keys if not key.startswith("hydra") and "._" not in key]
                where = f" with {' '.join(choices)}" if choices and name.partition(".")[0] in groups else ""
                raise UserError(
                    f"There is no setting '{name}'{where}. {did_you_mean(name, own)}"
                    f"See all with: python {config_name}.py --cfg job"
                )


def _is_list_place(name: str, keys: Sequence[str]) -> bool:
    """Whether `optim.betas.1` names an item of the list optim.betas."""
    parent, _, place = name.rpartition(".")
    return place.isdigit() and parent in keys


def _plain(cfg: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    return tree
