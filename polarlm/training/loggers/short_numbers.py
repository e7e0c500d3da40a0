"""Numbers and times as a person reads them at a glance."""

from __future__ import annotations

import math


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
