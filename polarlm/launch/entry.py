"""The edge between people and the program: one clear message for a wrong input, an exit code for the shell."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig

from polarlm.errors import JobsLeft, UserError, did_you_mean, is_wrong_input, typed_command
from polarlm.jobs import sweep
from polarlm.jobs.job import watch_parent
from polarlm.printing import visible_stdout, visible_text
from polarlm.startup import skip_unused_libraries

Task = Callable[[DictConfig], float]


def train(arguments: Sequence[str] | None = None) -> None:
    """`python train.py …` and `polarlm train …`."""

    def task(cfg: DictConfig) -> float:
        from polarlm.launch.train import train_job

        return train_job(cfg)

    run(task, "train", arguments)


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """`python eval.py …` and `polarlm eval …`."""
    from polarlm.launch.evaluate import as_lists

    def task(cfg: DictConfig) -> float:
        from polarlm.launch.evaluate import evaluate_run

        return evaluate_run(cfg)

    typed = as_lists(sys.argv[1:] if arguments is None else arguments)
    run(task, "eval", ["trust_data=true" if argument == "--trust-data" else argument for argument in typed])


def run(task: Task, config_name: str, arguments: Sequence[str] | None = None) -> None:
    """Compose `config_name` with the command line and run `task`, once or for every job of a sweep; then exit."""
    global _debug
    typed = sys.argv  # put back for the task: it records the command, and Lightning starts other ranks with it
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _debug = "--debug" in arguments or os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    # Hydra prints its own shortened tracebacks unless told to let errors through; presenting them is our job.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    watch_parent()
    skip_unused_libraries()
    try:
        flags, overrides = split_arguments([a for a in arguments if a != "--debug"])
        others = [a for a in arguments if a not in (*overrides, "--debug")]
        if "help" in flags:
            with ended_by_its_reader():
                return print_help(config_name)
        if not flags & {"hydra_help", "shell_completion"}:
            multirun, show_only = "multirun" in flags, bool(flags & SHOWING)
            overrides = check_command_line(config_name, overrides, multirun=multirun, show_only=show_only)
        sys.argv = [typed[0], *others, *overrides]
        with ended_by_its_reader() if flags & SHOWING else contextlib.nullcontext(), visible_stdout():
            start(_job(task, typed), config_name)
    except JobsLeft:
        pass
    except (Exception, KeyboardInterrupt) as error:
        sweep.print_sweep_summary()
        fail(error)
    finally:
        sys.argv = typed
    sweep.print_sweep_summary()
    if (failed := sweep.failed_jobs()) is not None:
        fail(failed)


_debug = False
SHOWING = {"help", "hydra_help", "shell_completion", "cfg", "info"}  # flags that print something and train nothing


@contextlib.contextmanager
def ended_by_its_reader() -> Iterator[None]:
    """`… --help | head` ends silently, as other programs do, when head has read enough."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL) if hasattr(signal, "SIGPIPE") else None
    try:
        yield
        sys.stdout.flush()
    finally:
        if before is not None:
            signal.signal(signal.SIGPIPE, before)


def check_command_line(config_name: str, overrides: list[str], *, multirun: bool, show_only: bool = False) -> list[str]:
    """Refuse a wrong choice or key before anything is imported or written; returns the overrides for Hydra."""
    from polarlm.launch.overrides import config_loader, plan_jobs

    plan = plan_jobs(config_loader(), config_name, overrides, multirun=multirun)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    if plan.multirun and not show_only:
        sweep.print_sweep_plan(plan, config_name)
    return plan.overrides


def print_help(config_name: str) -> None:
    """`--help`: Hydra's own would also list what cannot be chosen here."""
    from polarlm.launch.overrides import config_loader

    print(help_text(config_loader(), config_name))


def help_text(loader: Any, config_name: str) -> str:
    """`train --help`: the text of the yaml, the choices that can be typed, the command as typed."""
    import string

    from polarlm.launch.overrides import compose

    hydra = compose(loader, config_name, []).hydra
    # Groups of Hydra's and of other commands (`polarlm study`) cannot be chosen here.
    names = sorted(name for name in hydra.runtime.choices if not name.startswith("hydra"))
    lines = [line for name in names for line in _choices(name, sorted(loader.get_group_options(name)))]
    if config_name == "train":
        lines += _choices("hydra/launcher", ["local", "serial", "slurm"])  # how a sweep's jobs are run
    text = string.Template(hydra.help.template).safe_substitute(APP_CONFIG_GROUPS="\n".join(lines) + "\n")
    for verb in ("train", "eval"):
        text = text.replace(f"python {verb}.py", typed_command(verb))
    return text


def _choices(name: str, options: list[str]) -> list[str]:
    if name != "block":
        return [_filled("  ", f"{name}: {', '.join(options)}")]
    polar = [option for option in options if option.startswith("polar")]
    baselines = [option for option in options if option.startswith(("standard", "xsa"))]
    others = [option for option in options if option not in (*polar, *baselines)]
    return [
        _filled("  ", f"block: {', '.join(polar)}"),
        _filled("    ", f"baselines: {', '.join(baselines)}"),
        _filled("    ", f"others: {', '.join(others)}"),
    ]


def _filled(indent: str, text: str) -> str:
    import shutil
    import textwrap

    width = max(60, min(shutil.get_terminal_size().columns, 120))
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def start(task: Task, config_name: str) -> None:
    """Hand over to Hydra, which reads sys.argv."""
    import hydra

    from polarlm.launch.overrides import register_plugins
    from polarlm.locations import CONFIGS

    register_plugins()
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(task)()


def split_arguments(arguments: list[str]) -> tuple[set[str], list[str]]:
    """(names of the flags given, the overrides), in whatever order they were typed."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    known = [option for action in parser._actions for option in action.option_strings]

    def refuse(text: str) -> Any:
        wrong = [a for a in arguments if a.startswith("-") and a.partition("=")[0] not in known]
        if wrong:
            near = did_you_mean(wrong[0], [k for k in known if k.startswith("--")])
            raise UserError(f"There is no flag {wrong[0]}. {near}Settings are written key=value, without dashes")
        raise UserError(f"The flags can't be read: {text}; see --hydra-help")

    parser.error = refuse  # type: ignore[method-assign, assignment]
    options = vars(parser.parse_intermixed_args(arguments))
    overrides = options.pop("overrides")
    if options.get("experimental_rerun"):
        raise UserError("--experimental-rerun would execute a pickle; give the same command again to continue a run")
    if options.get("resolve") and not options.get("cfg"):
        raise UserError("--resolve only changes what --cfg prints; write --cfg job --resolve")
    return {name for name, value in options.items() if value not in (None, False)}, overrides


def _job(task: Task, typed: list[str]) -> Task:
    """A Hydra task whose errors are told once: here for a single run, at the end of the sweep for a multirun."""

    @functools.wraps(task)
    def explained(cfg: DictConfig) -> float:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        sys.argv = typed
        try:
            return task(cfg)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                print(f"error: {visible_text(message(error))}", file=sys.stderr, flush=True)
                raise
            fail(error)
            raise

    return explained


def fail(error: BaseException) -> None:
    """Print the message (after the traceback when asked for) and exit."""
    if _debug:
        traceback.print_exception(error)
    print(f"error: {visible_text(message(error))}", file=sys.stderr, flush=True)
    sys.exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """2 for a wrong input, 130 for Ctrl-C, 1 for a failure of ours."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if is_wrong_input(error) or isinstance(error, (HydraException, OmegaConfBaseException)) else 1


def message(error: BaseException) -> str:
    """What a person should read about an error."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if is_wrong_input(error):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, OmegaConfBaseException):
        where = f"{cause.full_key}: " if cause.full_key else ""
        return f"{where}{str(cause.msg or cause).splitlines()[0]}"
    if isinstance(error, HydraException):
        return " ".join(line.strip() for line in str(error).splitlines()[:2])
    return f"{type(error).__name__}: {error} (--debug shows the traceback)"
