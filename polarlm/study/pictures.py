"""The forest of a part as SVG: differences with the intervals that hold together, and the no-difference zone."""

from __future__ import annotations

import io
import math
from typing import Any

from polarlm.study.judge import JudgedPart, Line

INK, FAINT, BETTER, WORSE = "#334155", "#94a3b8", "#0f766e", "#b45309"
COLOURS = {"better": BETTER, "worse": WORSE}


def forest(judged: JudgedPart) -> bytes | None:
    """None where there is no interval to draw. Text stays text, no date, a fixed salt: the bytes repeat."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = [
        line for line in judged.lines if line.comparison is not None and line.comparison.difference.low is not None
    ]
    if not lines:
        return None
    style: Any = {"svg.hashsalt": "polarlm", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 0.9 + 0.3 * len(lines)), layout="constrained")
        axis = figure.subplots()
        margin = next((line.comparison.margin for line in lines if line.comparison), None)
        if margin:
            axis.axvspan(-margin, margin, color=FAINT, alpha=0.2, linewidth=0)
        axis.axvline(0, color=FAINT, linewidth=0.8)
        ends = [_draw(axis, place, line) for place, line in enumerate(lines)]
        widest = max(abs(end) for pair in ends for end in pair)
        axis.set_xlim(-1.08 * max(widest, margin or 0), 1.08 * max(widest, margin or 0))
        axis.set_yticks(range(len(lines)), [line.variant for line in lines])
        axis.invert_yaxis()
        axis.set_xlabel(_axis_label(judged))
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(colors=INK, length=0)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().decode().splitlines()).encode() + b"\n"


def _draw(axis: Any, place: int, line: Line) -> tuple[float, float]:
    """One difference with its interval; returns the interval's ends."""
    c = line.comparison
    assert c is not None and c.difference.low is not None and c.difference.high is not None
    low, high = c.simultaneous or (c.difference.low, c.difference.high)
    low = c.difference.low if not math.isfinite(low) else low
    high = c.difference.high if not math.isfinite(high) else high
    colour = COLOURS.get(line.outcome, INK)
    axis.plot([low, high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    axis.plot([c.difference.mean], [place], marker="o", markersize=4.5, color=colour)
    return low, high


def _axis_label(judged: JudgedPart) -> str:
    first = next(line.comparison for line in judged.lines if line.comparison)
    same = all(line.comparison is None or line.comparison.baseline == first.baseline for line in judged.lines)
    what = f"difference from {first.baseline}" if same else "difference from the rung before"
    direction = "below 0: better" if judged.measure.lower_is_better else "above 0: better"
    return f"{what} ({judged.measure.unit}; {direction})"
