"""What a person typed, checked before Hydra runs it: every choice, key and value is right, or the nearest is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from polarlm.block_keys import PARTS, VARIANTS, current_overrides, expanded
from polarlm.errors import UserError, did_you_mean, typed_command
from polarlm.launch.check import check_eval, check_train
from polarlm.launch.schema import SECTIONED_GROUPS
from polarlm.locations import CONFIGS, own_configs

CHECKS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "train": check_train,
    "eval": check_eval,
}


@dataclass(frozen=True)
class PlannedJob:
    """One run: its overrides, and its configuration as plain, checked values, or why it is refused."""

    overrides: list[str]
    config: dict[str, Any] | None
    error: UserError | None = None


@dataclass(frozen=True)
class PlannedJobs:
    """What a command line asks for."""

    multirun: bool
    overrides: list[str]  # as Hydra wants them
    jobs: list[PlannedJob]
    varied: list[str]  # the keys that differ between the jobs
    notes: list[str] = field(default_factory=list)  # about names that are old


class UserConfigs(SearchPathPlugin):
    """A folder `configs` where the command is typed adds choices to ours: configs/block/mine.yaml makes block=mine."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := own_configs()) is not None:
            search_path.append(provider="polarlm-user", path=folder.as_uri())


def register_plugins() -> None:
    """Tell Hydra about the user's own configs, once per process."""
    known = Plugins.instance()
    if UserConfigs not in known.discover(SearchPathPlugin):
        known.register(UserConfigs)


def config_loader() -> Any:
    """Hydra's loader over our configs (and the user's own), with Hydra left as it was found."""
    return _loader(own_configs())


@cache
def _loader(user_configs: Path | None) -> Any:
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


def plan_jobs(loader: Any, config_name: str, overrides: Sequence[str], *, multirun: bool) -> PlannedJobs:
    """Check every override and expand the sweep; a wrong one is a UserError that names the nearest right one.

    A wrong value in one job of a sweep is kept with that job, unless every job is wrong.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.types import RunMode

    groups, notes = dict(compose(loader, config_name, []).hydra.runtime.choices), list[str]()
    if "block" in groups:
        groups |= {f"block/{part}": None for part in PARTS}
        overrides, notes = current_overrides(overrides)
    # `+sweep=nu` asks for what `sweep=nu` asks for; Hydra itself would refuse the + of a group it knows.
    overrides = [
        text[1:] if text.startswith("+") and text[1:].partition("=")[0] in groups else text for text in overrides
    ]
    parsed = [_parse(loader, text) for text in overrides]
    named = [o.input_line for o in parsed if o.key_or_group in groups and not o.is_sweep_override()]
    named = [text for text in named if not text.startswith("block/")]  # whether the block has such a part is seen below
    for override in parsed:
        _check_choice(loader, config_name, groups, override)
    hydra = compose(loader, config_name, named).hydra
    # A job of a named sweep says hydra.mode=RUN: it is one run, whatever the sweep's own file says.
    single = any(o.key_or_group == "hydra.mode" and str(o.value()) == RunMode.RUN.name for o in parsed)
    swept = {} if single else hydra.sweeper.get("params") or {}
    params = [_parse(loader, f"{key}={value}") for key, value in swept.items()]
    for override in params:
        if override.is_hydra_override():
            raise UserError(f"A sweep can't set {override.input_line}: only you can, on the command line")
        _check_choice(loader, config_name, groups, override)
    multirun = multirun or (hydra.mode == RunMode.MULTIRUN and not single)
    _check_several([*params, *parsed], parsed, multirun)
    everything = [o for o in (*params, *parsed) if not o.is_hydra_override()]
    for_hydra = [o.input_line for o in parsed if o.is_hydra_override()]
    jobs = [[override.input_line for override in everything]]
    if multirun:  # as hydra_plugins.polarlm_local.VariantSweeper makes them
        jobs = [expanded(job) for job in BasicSweeper.split_arguments(everything, None)[0]]
    varied = list(dict.fromkeys(o.key_or_group for o in everything if o.is_sweep_override()))
    planned = list(_check_jobs(loader, config_name, groups, for_hydra, jobs))
    if all(job.error for job in planned):
        raise planned[0].error  # type: ignore[misc]
    return PlannedJobs(multirun, overrides, planned, varied, notes)


def compose(loader: Any, config_name: str, overrides: Sequence[str]) -> Any:
    """The configuration that Hydra composes for one run, with its own node `hydra`; to be read, not changed."""
    return _composed(loader, config_name, tuple(overrides))


@lru_cache(maxsize=256)
def _composed(loader: Any, config_name: str, overrides: tuple[str, ...]) -> Any:
    import yaml
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    try:
        return loader.load_configuration(config_name, list(overrides), run_mode=RunMode.RUN)
    except (HydraException, OmegaConfBaseException):
        raise  # these are explained where they are shown
    except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{' '.join(overrides)}: a yaml file that this needs can't be read: {reason}") from error


def named_choices(choices: Any) -> dict[str, Any]:
    """The names chosen of a run's groups; those of a block's parts stand in the parts themselves."""
    return {k: v for k, v in choices.items() if "hydra" not in k and "/" not in k and v is not None}


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
    except (OverrideParseException, ValueError) as error:  # a number of 5,000 digits is a ValueError
        hint = "write key=value" if "=" not in text else "quote values with special characters: key='…'"
        raise UserError(f"'{text[:200]}' can't be read as a setting; {hint}") from error


def _check_choice(loader: Any, config_name: str, groups: dict[str, Any], override: Any) -> None:
    """A group override names files that exist."""
    name = override.key_or_group
    if name not in groups:
        if "." not in name and "/" not in name and name in loader.list_groups("") and not override.is_add():
            if name == "study":
                raise UserError(f"A study is a plan of many runs: python -m polarlm study {override.value()}")
            raise UserError(
                f"{config_name}.py has no '{name}': a run is evaluated with the settings of its training. "
                f"Train another run for another {name}, or see {typed_command(config_name)} --help"
            )
        return
    if override.is_delete():
        raise UserError(f"'{override.input_line}': every run needs a {name}; choose one with {name}=…")
    options = loader.get_group_options(name)
    if name == "block":
        options = [*options, *VARIANTS]
    given = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if name in SECTIONED_GROUPS:  # logger=[wandb,csv]
        given = [value for entry in given for value in (entry if isinstance(entry, list) else [entry])]
    for value in given:
        if str(value) not in options:
            raise UserError(
                f"{name}={value} does not exist. {did_you_mean(str(value), options)}Choices: {', '.join(options)}"
            )


MOST_JOBS = 100_000


def _check_several(overrides: Sequence[Any], typed: Sequence[Any], multirun: bool) -> None:
    """Several values are for a sweep, and a sweep has at least one job and an end."""
    several = next((o for o in typed if o.is_sweep_override()), None)
    if several is not None and not multirun:
        raise UserError(
            f"{several.input_line} names several values; add -m to train every combination, "
            f"or write {several.key_or_group}=[…] for a list"
        )
    endless = next((o for o in overrides if o.is_interval_sweep()), None)
    if endless is not None:
        raise UserError(f"{endless.input_line} is an interval, which has no end of values; list them: a,b,c")
    total = 1
    for override in overrides if multirun else ():
        if override.is_sweep_override():
            count = sum(1 for _ in islice(override.sweep_iterator(), MOST_JOBS + 1))
            if not count:
                raise UserError(f"{override.input_line} has no value, so there is nothing to run; list values: a,b,c")
            total *= count
        if override.key_or_group == "hydra.sweeper.max_batch_size":
            size = override.value()
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise UserError(f"hydra.sweeper.max_batch_size={size} must be a whole number ≥ 1, or null")
    if total > MOST_JOBS:
        raise UserError(f"This sweep has more than {MOST_JOBS:,} jobs; list fewer values")


def _check_jobs(
    loader: Any, config_name: str, groups: dict[str, Any], for_hydra: list[str], jobs: list[list[str]]
) -> Iterator[PlannedJob]:
    """Every key exists in what the job's own choices compose, and every value is of its type and range."""
    from omegaconf import OmegaConf

    composed: dict[tuple[str, ...], tuple[Any, list[str]]] = {}
    for job in jobs:
        overrides = [_parse(loader, text) for text in (*for_hydra, *job)]
        choices = tuple(o.input_line for o in overrides if o.key_or_group in groups)
        _check_parts(loader, config_name, groups, overrides)
        if choices not in composed:
            shipped = compose(loader, config_name, choices)
            _check_hydra(loader, config_name, choices, shipped.hydra)
            composed[choices] = shipped, list(flat_keys(OmegaConf.to_container(shipped, resolve=False)))
        shipped, keys = composed[choices]
        settings = [o for o in overrides if o.key_or_group not in groups and "/" not in o.key_or_group]
        for override in settings:
            _check_key(config_name, groups, choices, keys, override)
        try:
            yield PlannedJob(job, _checked(config_name, shipped, settings))
        except UserError as error:
            yield PlannedJob(job, None, error)


# Settings of Hydra that call functions, set the environment or choose folders.
HYDRA_OF_USERS = (
    *("callbacks", "job_logging", "hydra_logging", "env", "run", "sweep", "output_subdir", "searchpath"),
    *("job.chdir", "job.env_set", "job.env_copy"),
)


def _check_hydra(loader: Any, config_name: str, choices: tuple[str, ...], chosen: Any) -> None:
    """A yaml says how a sweep runs; what Hydra calls, and where it writes, only the user says."""
    from omegaconf import OmegaConf

    def written(hydra: Any, key: str) -> Any:
        value = OmegaConf.select(hydra, key)
        return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value

    typed = compose(loader, config_name, [choice for choice in choices if choice.startswith("hydra/")]).hydra
    for key in HYDRA_OF_USERS:
        if written(typed, key) != written(chosen, key):
            raise UserError(
                f"hydra.{key} is set by a yaml of {' '.join(choices)}; a yaml can set hydra.mode, hydra.sweeper and "
                f"hydra.launcher, the rest is typed on the command line"
            )


def _check_parts(loader: Any, config_name: str, groups: dict[str, Any], overrides: Sequence[Any]) -> None:
    """A part is chosen only of a block that is made of parts."""
    typed = [o for o in overrides if o.key_or_group.startswith("block/") and o.key_or_group in groups]
    if not typed:
        return
    block = compose(loader, config_name, [o.input_line for o in overrides if o.key_or_group == "block"]).hydra
    if typed[0].key_or_group not in block.runtime.choices:
        raise UserError(
            f"{typed[0].input_line}: block={block.runtime.choices['block']} has no such part. "
            "Parts are chosen of block=polar and block=polar_paper"
        )


def _check_key(config_name: str, groups: dict[str, Any], choices: tuple[str, ...], keys: list[str], o: Any) -> None:
    name = o.key_or_group
    parent, _, place = name.rpartition(".")
    exists = name in keys or (place.isdigit() and parent in keys)  # optim.betas.1 is an item of a list
    if o.is_add() and not o.is_force_add() and exists:
        raise UserError(f"'{name}' exists already; write {name}=… without the +")
    if not o.is_add() and not exists:
        near = [key for key in keys if not key.startswith("hydra") and "._" not in key]
        where = f" with {' '.join(choices)}" if choices and name.partition(".")[0] in groups else ""
        raise UserError(
            f"There is no setting '{name}'{where}. {did_you_mean(name, near)}"
            f"See all with: {typed_command(config_name)} --cfg job"
        )
    if o.is_delete():
        raise UserError(f"'{o.input_line}': a setting can't be taken away; give it another value")


def _checked(config_name: str, shipped: Any, overrides: Sequence[Any]) -> dict[str, Any]:
    """The job's configuration: what the files say, with the overrides, as plain values of the right types."""
    import copy

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = copy.deepcopy(shipped)
    choices = named_choices(config.hydra.runtime.choices)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    try:
        for override in overrides:
            if override.value() == {}:
                raise UserError(f"{override.input_line} would change nothing: a mapping is merged with what is there")
            if not override.key_or_group.startswith("hydra"):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UserError(f"{missing[0]} must be given: {missing[0]}=…")
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'The configuration'}: {str(error.msg).splitlines()[0]}") from error
    original: Any = OmegaConf.to_container(shipped, resolve=False)
    return {**CHECKS[config_name](plain, original), "choices": choices}
