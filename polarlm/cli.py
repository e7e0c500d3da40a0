"""`polarlm <verb>` or `python -m polarlm <verb>`: everything, from any folder."""

from __future__ import annotations

import argparse
import sys

import polarlm
from polarlm.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run the verb, return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["train"], ["eval"]):  # Hydra reads the rest: key=value, -m, --help, --cfg job …
        from polarlm.launch import entry

        {"train": entry.train, "eval": entry.evaluate}[arguments[0]](arguments[1:])
        return 0
    debug = "--debug" in arguments
    try:
        options = parser().parse_args([a for a in arguments if a != "--debug"])
        return options.run(options) or 0
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) left
        return 0


def parser() -> argparse.ArgumentParser:
    """All verbs; each package adds its own."""
    from polarlm.data import commands as data
    from polarlm.launch import doctor, sweep, trial
    from polarlm.report import commands as report
    from polarlm.runs import commands as runs
    from polarlm.training.loggers import wandb_workspace

    top = argparse.ArgumentParser(
        prog="polarlm", description="Train, look at, use and compare runs. (--debug shows tracebacks)"
    )
    top.add_argument("--version", action="version", version=f"polarlm {polarlm.__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="verb", required=True)
    verbs.add_parser("train", help="train a run or a sweep, as python train.py does (polarlm train --help)")
    verbs.add_parser("eval", help="judge a run from its folder, as python eval.py does (polarlm eval --help)")
    for package in (sweep, runs, report, trial, data, doctor, wandb_workspace):
        package.add_parser(verbs)
    return top


if __name__ == "__main__":
    sys.exit(main())
