"""`python -m polarlm <verb>`: everything after training."""

from __future__ import annotations

import argparse
import sys

from polarlm.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run the verb, return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
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
    """All verbs; each room adds its own."""
    from polarlm.data import commands as data
    from polarlm.report import commands as report
    from polarlm.runs import commands as runs
    from polarlm.training.loggers import wandb_workspace

    top = argparse.ArgumentParser(
        prog="python -m polarlm", description="Look at, use and compare trained runs. (--debug shows tracebacks)"
    )
    verbs = top.add_subparsers(title="verbs", metavar="verb", required=True)
    for room in (runs, report, data, wandb_workspace):
        room.add_parser(verbs)
    return top


if __name__ == "__main__":
    sys.exit(main())
