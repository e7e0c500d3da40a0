"""Text from a model or a stranger, safe to print: a terminal obeys control characters, so they are shown instead.

And lines of our own: those that are longer than the terminal is wide, those that are said once.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TextIO

# Cc: control characters; Cf: invisible formatting (also what turns text around); the rest has no glyph of its own.
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_KEPT = "\n\t\u200d"  # line ends, tabs, and the joiner inside emoji


def visible_text(text: str) -> str:
    """The text with every control or invisible character written as an escape: \\x1b, \\u202e."""
    return "".join(
        character if character in _KEPT or unicodedata.category(character) not in _HIDDEN else escape(character)
        for character in text
    )


class VisibleOutput:
    """A text stream that shows control characters instead of passing them on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text as it may be seen."""
        return self.stream.write(visible_text(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def visible_stdout() -> Iterator[None]:
    """Whatever is printed inside: run folders, plans and samples may say anything, and all verbs print some of it."""
    with contextlib.redirect_stdout(VisibleOutput(sys.stdout)):
        yield


@cache
def say_once(text: str) -> None:
    """Print a line on stderr the first time it applies in this process (a sweep has many runs)."""
    print(text, file=sys.stderr)


def escape(character: str) -> str:
    """A character as Python would write it in a string."""
    return character.encode("unicode_escape").decode("ascii")


def fitted(text: str, stream: TextIO, hang: int = 4) -> str:
    """Lines that fit the terminal `stream` is, broken between words and indented by `hang`; elsewhere as they are."""
    if not stream.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.splitlines()
    )
