"""`polarlm <verb>` or `python -m polarlm <verb>`: everything, from any folder."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import polarlm
from polarlm.errors import JobsLeft, UserError, did_you_mean
from polarlm.printing import visible_stdout, visible_text
from polarlm.startup import skip_unused_libraries


def main(arguments: list[str] | None = None) -> int:
    """Parse, run the verb, return its exit code: 2 for a wrong input, 1 for a failure, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["train"], ["eval"]):  # Hydra reads the rest: key=value, -m, --help, --cfg job …
        from polarlm.launch import entry

        {"train": entry.train, "eval": entry.evaluate}[arguments[0]](arguments[1:])
        return 0
    skip_unused_libraries()
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        options = parser().parse_args(arguments)
        with visible_stdout():
            return options.run(options) or 0
    except KeyboardInterrupt:
        return 130
    except JobsLeft as left:
        print(left, file=sys.stderr)
        return 0
    except BrokenPipeError:  # the reader (head, less) left
        return 0
    except Exception as error:
        if debug:
            raise
        from polarlm.launch.entry import exit_code, message

        print(f"error: {visible_text(message(error))}", file=sys.stderr)
        return exit_code(error)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence that names the nearest right word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)  # examples keep their lines

    def error(self, message: str) -> NoReturn:
        """Refuse; `message` is argparse's own sentence."""
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(choice) for choice in action.choices]
            what = action.metavar or action.dest or "word"
            raise UserError(
                f"There is no {what} '{value}'. {did_you_mean(str(value), words)}Choices: {', '.join(words)}"
            )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse everything, or name the flag that nobody knows."""
        options, unknown = self.parse_known_args(args, namespace)
        if isinstance(settings := getattr(options, "settings", None), list):  # key=value may stand after a flag, too
            settings += [word for word in unknown if "=" in word and not word.startswith("-")]
            unknown = [word for word in unknown if word not in settings]
        if unknown:
            near = did_you_mean(unknown[0].partition("=")[0], sorted(set(self.flags())))
            raise UserError(f"'{unknown[0]}' is not understood. {near}See {self.prog} --help")
        return options

    def flags(self) -> Iterator[str]:
        """Every long flag of this parser and of its verbs."""
        for action in self._actions:
            yield from (flag for flag in action.option_strings if flag.startswith("--"))
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from verb.flags()


def parser() -> Parser:
    """All verbs; each package adds its own."""
    from polarlm.jobs import sweep, trial, tune
    from polarlm.launch import accept, commands, corpora, doctor, explain, inspect, wandb_views
    from polarlm.report import commands as report

    top = Parser(prog="polarlm", description="Train, evaluate and compare language models. (--debug shows tracebacks)")
    top.add_argument("--version", action="version", version=f"polarlm {polarlm.__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="verb", required=True)
    verbs.add_parser("train", help="train a run or a sweep, like python train.py (polarlm train --help)")
    verbs.add_parser("eval", help="evaluate a run, like python eval.py (polarlm eval --help)")
    for package in (sweep, tune, commands, inspect, explain, report, trial, corpora, doctor, accept, wandb_views):
        package.add_parser(verbs)
    add_study(verbs)
    return top


def add_study(verbs: Any) -> None:
    """The verb `study`: our own experiments, which lie beside the package in a checkout and not in the wheel."""
    checkout = Path(polarlm.__file__).resolve().parents[1]
    if (checkout / "study" / "commands.py").is_file():
        if "study.commands" not in sys.modules:
            sys.path.insert(0, str(checkout))  # before a user's own module of that name
        importlib.import_module("study.commands").add_parser(verbs)
        return
    absent = verbs.add_parser("study", help="our own experiments (only in a checkout of the repository)")
    absent.add_argument("rest", nargs="*")
    absent.set_defaults(run=refuse_study)


def refuse_study(options: argparse.Namespace) -> int:
    """Say where the study is."""
    raise UserError("polarlm study carries out the experiments of our repository: it needs a checkout, not the wheel")
