"""The edge between people and the program: one clear message for a wrong input, an exit code for the shell."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from polarlm.errors import UserError
from polarlm.launch.sweep import tell_sweep

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def run(main: Callable[[], None]) -> None:
    """Run a Hydra main function and turn whatever it raises into a message and an exit code."""
    global _debug
    _debug = "--debug" in sys.argv or os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    flags = [a for a in sys.argv[1:] if a in ("-m", "--multirun")]  # Hydra wants them before the settings
    sys.argv = [sys.argv[0], *flags, *(a for a in sys.argv[1:] if a not in (*flags, "--debug"))]
    # Hydra prints its own shortened tracebacks unless told to let errors through; presenting them is our job.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        tell_sweep()
        fail(error)
    tell_sweep()


_debug = False


def job(function: Callable[[DictConfig], float]) -> Callable[[DictConfig], float]:
    """A Hydra task whose errors are told once: here for a single run, at the end of the sweep for a multirun."""

    @functools.wraps(function)
    def told(cfg: DictConfig) -> float:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        try:
            return function(cfg)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                print(f"error: {message(error)}", file=sys.stderr, flush=True)
                raise
            fail(error)
            raise

    return told


def fail(error: BaseException) -> None:
    """Print the message (after the traceback when asked for) and exit."""
    if _debug:
        traceback.print_exception(error)
    print(f"error: {message(error)}", file=sys.stderr, flush=True)
    sys.exit(130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1)


def message(error: BaseException) -> str:
    """What a person should read about an error."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain(error)
    return f"{type(error).__name__}: {error} (--debug shows the traceback)"


def explain(error: Exception) -> str:
    """A sentence for a configuration error, naming the nearest valid keys or choices."""
    text = str(error)
    override = getattr(error, "override", None)
    if override is not None:
        why = text.splitlines()[0]
        return f"'{override}' is not a valid setting: {why}. Write key=value; quote values with special characters"
    cause = str(error.__cause__ or "")
    missing = re.search(r"Could not find '([\w./-]+)'", text) or re.search(
        r"In '.*?': Could not find '([\w./-]+)'", text
    )
    if missing and "/" in missing[1]:
        group, _, choice = missing[1].rpartition("/")
        options = sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))
        return f"{group}={choice} does not exist. {nearest(choice, options)}Choices: {', '.join(options)}"
    key = re.search(r"Could not override '([\w.@/]+)'", text) or re.search(r"Key '([\w.]+)' is not in struct", text)
    if key:
        keys = [k for k, _ in _known_keys()]
        return f"There is no setting '{key[1]}'. {nearest(key[1], keys)}See all with: python train.py --cfg job"
    lost = re.search(r"Could not append to config\. An item is already at '([\w.]+)'", text)
    if lost:
        return f"'{lost[1]}' exists already; write {lost[1]}=… without the +"
    if "Missing mandatory value" in text or "MissingMandatoryValue" in type(error).__name__:
        return text.splitlines()[0] + "; give it on the command line"
    return " ".join(
        part.strip() for part in (text + ("\n" + cause if cause and cause not in text else "")).splitlines()[:4]
    )


def nearest(word: str, options: list[str]) -> str:
    """'Did you mean x?' with the closest option(s), or nothing."""
    tail = word.rpartition(".")[2]
    close = difflib.get_close_matches(word, options, n=3, cutoff=0.6)
    close += [o for o in options if o not in close and o.rpartition(".")[2] == tail][:2]
    return f"Did you mean {' or '.join(close[:3])}? " if close else ""


def _known_keys() -> list[tuple[str, object]]:
    """Every key of the configuration with the groups chosen on this command line."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from polarlm.runs.identity import flatten

    groups = {p.name for p in CONFIGS.iterdir() if p.is_dir()}
    chosen = []
    for argument in sys.argv[1:]:
        name, _, value = argument.lstrip("+").partition("=")
        if name in groups and "," not in value and (CONFIGS / name / f"{value}.yaml").exists():
            chosen.append(argument)
    GlobalHydra.instance().clear()
    config_name = "eval" if Path(sys.argv[0]).stem == "eval" else "train"
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        tree = OmegaConf.to_container(compose(config_name, overrides=chosen), resolve=False)
    return list(flatten(tree))
