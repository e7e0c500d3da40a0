"""Text for people: aligned columns, short numbers and times, and what is safe to send to a terminal."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TextIO


def aligned(rows: Sequence[Sequence[str]], *, first_left: bool = True) -> list[str]:
    """A line per row: columns to the right, the first to the left unless told otherwise."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        if first_left:
            cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return lines


def indented(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same below a title."""
    return [f"  {line}" for line in aligned(rows)]


def short(number: float) -> str:
    """1234567 → '1.2M'."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """75 → '1:15'; an unknown time is a dash."""
    if math.isnan(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# -- text from a model or a stranger: control characters are shown, not obeyed ----------------------------------------


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
