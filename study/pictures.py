"""The study's pictures as SVG: comparisons with polar, the loss beyond the trained context, the loss against compute.

Each picture carries its date, its command and the hash of the rows it was drawn from, so that a test can tell when it
is older than the rows. Text stays text and the salt is fixed: the same rows and date give the same bytes.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.runs.files import write_text
from study.compute import fit_laws, settings_of_parts
from study.judge import Line
from study.numbers import length_curve

if TYPE_CHECKING:
    from study.results import Answer

INK, FAINT, BETTER, WORSE = "#334155", "#94a3b8", "#0f766e", "#b45309"
COLOURS = {"better": BETTER, "worse": WORSE}
LINES = {
    "standard_strong": ("#64748b", "standard_strong"),
    "xsa_strong": ("#b45309", "xsa_strong"),
    "xsa_forgetting": ("#7c3aed", "xsa_forgetting (forget gates)"),
    "polar_paper": ("#0284c7", "polar_paper (the paper's block)"),
    "polar_without_forgetting": ("#0f766e", "polar without forget gates"),
    "polar": ("#0f766e", "polar (forget gates)"),
}

WITHOUT = "polar_without_forgetting"


@dataclass(frozen=True)
class Bar:
    """One comparison as it is drawn: `polar` minus the other block."""

    group: str
    label: str
    mean: float
    low: float
    high: float
    joint: tuple[float, float] | None
    outcome: str
    parameters: float
    place: tuple[str, str, str]  # question, part, variant


GROUPS = {
    "standard_strong": "polar − standard_strong",
    "xsa_strong": "polar − xsa_strong",
    "xsa_forgetting": "polar − xsa_forgetting (baseline with the same forget gates)",
    "ablated": "what forget gates bring",
    "neighbours": "polar − published blocks (one learning rate for all)",
    "appendix": "polar − extensions of Appendix G",
}


def overview_bars(answers: Sequence[Answer]) -> list[Bar]:
    """Every comparison with polar in bits per byte, each pair of run sets once, grouped by baseline."""
    bars: dict[tuple[frozenset[str], frozenset[str]], Bar] = {}
    for answer in answers:
        if not answer.question.in_all:  # searches and decided questions used other versions of polar
            continue
        for name, judged in answer.parts.items():
            if judged is None or judged.measure.name != "val/bits_per_byte":
                continue
            part = answer.question.parts[name]
            lines = {line.variant: line for line in judged.lines}
            for line in judged.lines:
                bar = _bar(answer.question.name, name, part, line)
                if bar is not None and line.comparison is not None:
                    pair = (line.identities, lines[line.comparison.baseline].identities)
                    bars.setdefault(pair, bar)
    order = list(GROUPS)
    return sorted(bars.values(), key=lambda bar: order.index(bar.group))


def _bar(question: str, name: str, part: Any, line: Line) -> Bar | None:
    c = line.comparison
    if c is None or c.difference.low is None or c.difference.high is None or part.compare == "previous":
        return None
    is_polar, is_base = (part.variants[variant] == ("block=polar",) for variant in (line.variant, c.baseline))
    seeds = f"{c.difference.n} seeds"
    mean, low, high, joint, outcome = (
        c.difference.mean,
        c.difference.low,
        c.difference.high,
        c.joint_interval,
        line.outcome,
    )
    if is_polar and c.baseline in GROUPS:
        group, label = c.baseline, f"{part.title}, {seeds}"
    elif line.variant in ("polar_paper", WITHOUT) and not is_base:
        group, label = "ablated", f"{line.variant} − {c.baseline}: {part.title}, {seeds}"
    elif is_base and line.variant not in GROUPS:
        group = "ablated" if line.variant == WITHOUT else "neighbours" if name == "neighbours" else "appendix"
        label = f"{'polar − ' * (line.variant == WITHOUT)}{line.variant}: {part.title}, {seeds}"
        mean, low, high = -mean, -high, -low
        joint = (-joint[1], -joint[0]) if joint else None
        outcome = {"better": "worse", "worse": "better"}.get(outcome, outcome)
    else:
        return None
    parameters = float(line.rows[0]["parameters"])
    return Bar(group, label, mean, low, high, joint, outcome, parameters, (question, name, line.variant))


def marker_of(parameters: float) -> str:
    """The shape that says how large the models are."""
    return "D" if parameters < 5e5 else "s" if parameters > 2e6 else "o"


def draw_overview(answers: Sequence[Answer]) -> Any:
    """All comparisons with polar: dot, 95 % interval (thick) and the interval that holds for all of a table (thin)."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    bars = overview_bars(answers)
    places, headings, at = [], [], 0.0
    for index, bar in enumerate(bars):
        if index == 0 or bar.group != bars[index - 1].group:
            headings.append((at + 0.35, GROUPS[bar.group]))
            at += 1.15
        places.append(at)
        at += 1.0
    figure = Figure(figsize=(9.6, 1.1 + 0.212 * at), layout="constrained", facecolor="white")
    axis = figure.subplots()
    axis.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    for bar, place in zip(bars, places):
        colour = COLOURS.get(bar.outcome, INK)
        if bar.joint:
            axis.plot(bar.joint, [place, place], color=colour, linewidth=0.7, gid="joint", solid_capstyle="butt")
        axis.plot(
            [bar.low, bar.high], [place, place], color=colour, linewidth=2.4, gid="interval", solid_capstyle="butt"
        )
        axis.plot(
            [bar.mean], [place], marker=marker_of(bar.parameters), markersize=5, color=colour, markeredgecolor="white",
            markeredgewidth=0.6, gid="mean",
        )  # fmt: skip
    ends = [end for bar in bars for end in (bar.low, bar.high, *(bar.joint or ()))]
    axis.set_xlim(1.03 * min(ends), 1.03 * max(ends))
    axis.set_ylim(at, -0.4)
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=7.5)
    for place, words in headings:
        axis.annotate(
            words, (0, place), xycoords=("axes fraction", "data"), xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center", fontsize=8.5, fontweight="bold", color=INK, annotation_clip=False,
        )  # fmt: skip
    axis.set_xlabel("difference in bits per byte (left of 0: polar is better)", fontsize=9, color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(colors=INK, length=0)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color=FAINT, alpha=0.25, linewidth=0.6)
    shapes = [("D", "0.2 M parameters"), ("o", "0.8–1.1 M"), ("s", "4 M")]
    handles = [Line2D([], [], marker=m, color=INK, linestyle="", markersize=5, label=text) for m, text in shapes]
    handles += [
        Line2D([], [], color=BETTER, linewidth=2.4, label="95 % interval, difference shown"),
        Line2D([], [], color=INK, linewidth=2.4, label="95 % interval, not shown after Holm"),
        Line2D([], [], color=INK, linewidth=0.7, label="holds for all of its table"),
    ]
    figure.legend(handles=handles, loc="outside upper right", fontsize=7.5, ncols=3, frameon=False)
    return figure


def draw_length(answers: Sequence[Answer]) -> Any:
    """Bits per byte at multiples of the trained context, mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for line in length_lines(answers):
        curve = length_curve(line)
        colour, label = LINES[line.variant]
        dashed = "--" if line.variant == "polar_without_forgetting" else "-"
        axis.plot(range(len(curve)), list(curve.values()), dashed, color=colour, marker="o", markersize=4, label=label)
    axis.set_xticks(range(len(curve)), [f"{64 * factor}" for factor in curve])
    axis.set_xlabel("context in tokens (trained with 64)", fontsize=9, color=INK)
    axis.set_ylabel("bits per byte", fontsize=9, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK, labelsize=8)
    axis.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    axis.legend(fontsize=7.5, frameon=False)
    axis.set_title("Tiny Shakespeare, 0.8 M parameters, 1,000 steps, 5 seeds", fontsize=9, color=INK, loc="left")
    return figure


def length_lines(answers: Sequence[Answer]) -> Iterator[Line]:
    """The variants that were evaluated at longer contexts."""
    for answer in answers:
        judged = answer.parts.get("characters")
        if answer.question.name == "filtering" and judged is not None:
            yield from judged.lines


def draw_compute(answers: Sequence[Answer]) -> Any:
    """Loss against training compute and the gap to the baseline: a dot per seed, and the laws where they are fitted."""
    from matplotlib.figure import Figure

    answer = next(answer for answer in answers if answer.question.fit)
    rungs = settings_of_parts(answer.parts, answer.question.baseline)
    laws = fit_laws(rungs)
    figure = Figure(figsize=(9.6, 3.6), layout="constrained", facecolor="white")
    losses, gaps = figure.subplots(1, 2)
    for block in rungs[0].losses if rungs else ():
        colour, label = LINES.get(block, (INK, block))
        for rung in rungs:
            flops, ours, theirs = rung.flops[block], rung.losses[block], rung.losses[answer.question.baseline]
            losses.plot([flops] * len(ours), ours, "o", color=colour, markersize=4, gid="loss")
            gaps.plot([flops] * len(ours), ours - theirs, "o", color=colour, markersize=4, gid="gap")
        losses.plot([], [], "o-", color=colour, markersize=4, label=label)
        if laws is not None:
            between = np.geomspace(rungs[0].flops[block], rungs[-1].flops[block], 50)
            losses.plot(between, [laws.loss(block, f)[0] for f in between], color=colour, linewidth=1)
            gaps.plot(
                between, [laws.gap(block, answer.question.baseline, f)[0] for f in between], color=colour, linewidth=1
            )
    losses.set_yscale("log")
    losses.set_ylabel("bits per byte", fontsize=9, color=INK)
    gaps.set_ylabel(f"bits per byte, minus {answer.question.baseline}", fontsize=9, color=INK)
    for axis in (losses, gaps):
        axis.set_xscale("log")
        axis.set_xlabel("training FLOPs", fontsize=9, color=INK)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=8)
        axis.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    if rungs:
        losses.legend(fontsize=7.5, frameon=False)
    return figure


PICTURES: dict[str, Callable[[Sequence[Answer]], Any]] = {
    "overview": draw_overview,
    "length": draw_length,
    "compute": draw_compute,
}


def write_picture(name: str, answers: Sequence[Answer], summaries: Path, date: str) -> Path:
    """Draw one picture beside the rows."""
    path = summaries / f"{name}.svg"
    write_text(path, svg(PICTURES[name](answers), date, rows_hash(summaries)))
    return path


def svg(figure: Any, date: str, rows: str) -> str:
    """The figure as SVG with its date, command and rows, in its metadata and as a line of text at the bottom."""
    import matplotlib

    from study.results import COMMAND

    style: Any = {"svg.hashsalt": "polarlm", "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        figure.supxlabel(f"{date} · {COMMAND} · rows {rows}", fontsize=6.5, color=FAINT, x=0.99, ha="right")
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": date, "Description": f"{COMMAND}; rows {rows}"})
    return "\n".join(line.rstrip() for line in out.getvalue().decode().splitlines()) + "\n"


def rows_hash(summaries: Path) -> str:
    """A short hash of all rows: what a picture was drawn from."""
    digest = hashlib.sha256()
    for path in sorted(summaries.glob("*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def recorded_date(summaries: Path) -> str:
    """The date of the pictures: the day they were drawn from these very rows first; today if the rows are new."""
    date, rows = picture_origin(summaries / "overview.svg")
    return date if rows == rows_hash(summaries) else datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def picture_origin(path: Path) -> tuple[str, str]:
    """Date and hash of the rows that a picture says it was drawn from; empty where there is no picture."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    date = re.search(r"<dc:date>([\d-]+)</dc:date>", text)
    rows = re.search(r"<dc:description>[^<]*rows (\w+)</dc:description>", text)
    return date.group(1) if date else "", rows.group(1) if rows else ""
