"""Rows of text as aligned columns, numbers and times as a person reads them at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
