"""UserError, the error for users of the command line, and suggestions for mistyped names."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """Wrong input: which key or file, what was found, what is allowed, what to do. Shown without a traceback."""


class JobsLeft(Exception):
    """Jobs go on in a cluster's queue while this process ends: nothing has failed."""

    def __init__(self) -> None:
        super().__init__("The jobs stay in the queue; the same command reconnects to them.")


def is_wrong_input(error: BaseException) -> bool:
    """Whether an error is about what the user gave: ours, or a path that the system cannot even look for."""
    return isinstance(error, UserError) or (
        isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
    )


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """'Did you mean x? ' with the closest options (a dotted key may sit in another place), or nothing."""
    import difflib

    options = [str(option) for option in options]
    close = difflib.get_close_matches(word, options, n=3, cutoff=0.6)
    tail = word.rpartition(".")[2]
    close += [o for o in options if o not in close and o.rpartition(".")[2] == tail][:2]
    return f"Did you mean {' or '.join(close[:3])}? " if close else ""


def typed_command(verb: str) -> str:
    """How this person starts `verb` (train or eval): the script of a checkout, or the installed command."""
    return f"python {verb}.py" if Path(sys.argv[0]).name in ("train.py", "eval.py") else f"polarlm {verb}"
