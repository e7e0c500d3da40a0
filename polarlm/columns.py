"""Rows of text as aligned columns."""

from __future__ import annotations

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
