"""The final table, the differences in configuration and the list of runs: as cells, text, CSV, JSON or LaTeX."""

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.printing import aligned
from polarlm.report.captions import shared_caption, usual_caption
from polarlm.verdict.evidence import Estimate
from polarlm.verdict.groups import Group, config_differences, show
from polarlm.verdict.headline import headline
from polarlm.verdict.judgement import Judgement
from polarlm.verdict.measure import Measure

# More columns than this do not fit on a page; then one row per group names only what separates the groups.
MAX_COLUMNS = 8


@dataclass(frozen=True)
class Table:
    """Cells of text; all but the first column are numbers or short words."""

    columns: list[str]
    rows: list[list[str]]


def results_table(judgement: Judgement) -> Table:
    """One row per group: judged losses with intervals, the difference to the baseline, and what it cost."""
    judged_name, *others = judgement.measure.siblings()
    known = [m for m in others if any(judged.estimates[m].n for judged in judgement.rows)]
    losses = [judged_name, *known]
    columns = ["group", "seeds", *(Measure(m).title for m in losses)]
    columns += ["Δ to baseline", "p", "verdict", "parameters", "head", "tokens", "FLOPs", "seconds", "tokens/s"]
    rows = []
    for judged in judgement.rows:
        comparison = judged.comparison
        p = None if comparison is None else comparison.p_adjusted
        over = any(run.status == "finished" for run in judged.group.runs)
        row = [
            judged.group.label,
            str(judged.estimates[judgement.measure.name].n) if over else f"0 of {len(judged.group.runs)}",
        ]
        # A run that is not over has no final loss; where it stands is told as that.
        row += [show_estimate(e) if over else _so_far(e) for e in (judged.estimates[m] for m in losses)]
        row.append("" if comparison is None else show_estimate(comparison.difference, signed=True))
        row.append("" if p is None else ("<0.001" if p < 0.001 else f"{p:.3f}"))
        row.append(judged.outcome)
        budget = judged.budget
        row += [show_count(budget.parameters), "—" if judged.head_size is None else str(judged.head_size)]
        row += [show_count(budget.tokens), show_count(budget.flops), show_count(budget.seconds)]
        row.append(show_count(judged.tokens_per_second))
        rows.append(row)
    return Table(columns, rows)


def difference_table(groups: Sequence[Group]) -> Table:
    """In which settings the groups differ: one row per setting, or one row per group when there are many groups."""
    if len(groups) <= MAX_COLUMNS:
        settings = config_differences([group.runs[0] for group in groups])
        # The class of a block repeats the block's name.
        differences = {key: values for key, values in settings.items() if key != "block._target_"}
        if len({group.block for group in groups}) > 1:
            differences = {"block": [group.block for group in groups], **differences}
        return Table(
            ["setting", *(g.label for g in groups)],
            [[k, *(show(v) for v in values)] for k, values in differences.items()],
        )
    keys = list(dict.fromkeys(key for group in groups for key in group.varied))
    return Table(["group", *keys], [[g.label, *(show(g.varied.get(k)) for k in keys)] for g in groups])


def text_report(judgement: Judgement, width: int = 120) -> str:
    """The final table and the verdicts for a terminal."""
    numbers = f"Final loss on the {judgement.measure.split} split; ± is half of the 95 % interval."
    lines = [textwrap.fill(headline(judgement), width), "", textwrap.fill(numbers, width), ""]
    lines += [*_fitted(results_table(judgement), width), ""]
    if usual := usual_caption([judged.group for judged in judgement.rows]):
        lines += [textwrap.fill(usual, width), ""]
    for judged in judgement.rows:
        if judged.outcome != "baseline":
            lines.append(textwrap.fill(judged.sentence, width, initial_indent="• ", subsequent_indent="  "))
    lines += [textwrap.fill(note, width, initial_indent="! ", subsequent_indent="  ") for note in judgement.notes]
    return "\n".join(lines)


def csv_report(groups: Sequence[Group]) -> str:
    """One row per run: names, state, every number of its summary, and the settings that vary."""
    runs = [(group, run) for group in groups for run in group.runs]
    numbers = list(
        dict.fromkeys(k for _, r in runs for k, v in r.summary.items() if isinstance(v, (int, float)) and k != "seed")
    )
    settings = list(dict.fromkeys(key for group in groups for key in group.varied if "." in key))
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["run", "folder", "group", "block", "seed", "status", *numbers, *settings])
    for group, run in runs:
        head = [run.name, str(run.folder), group.label, run.block, run.seed, run.status]
        writer.writerow([*head, *(run.summary.get(n) for n in numbers), *(run.settings.get(s) for s in settings)])
    return stream.getvalue()


def json_report(judgement: Judgement, payload: dict[str, Any]) -> dict[str, Any]:
    """The judged numbers beside everything that the page draws."""

    def plain(estimate: Estimate) -> dict[str, Any]:
        known = estimate.n > 0 or estimate.method == "no shared seed"
        mean = estimate.mean if known else None
        return {"mean": mean, "low": estimate.low, "high": estimate.high, "n": estimate.n, "method": estimate.method}

    judged = [
        {
            "group": row.group.label,
            "block": row.group.block,
            "settings": {k: show(v) for k, v in row.group.varied.items()},
            "seeds": list(row.group.seeds),
            "estimates": {name: plain(e) for name, e in row.estimates.items()},
            "difference": plain(row.comparison.difference) if row.comparison else None,
            "p_value": row.comparison.p_value if row.comparison else None,
            "p_adjusted": row.comparison.p_adjusted if row.comparison else None,
            "outcome": row.outcome,
            "simultaneous": finite_ends(row.comparison.simultaneous) if row.comparison else None,
            "gains": {gain.currency: plain(gain.factor) for gain in row.gains},
            "head_size": row.head_size,
            "verdict": row.sentence,
            "parameters": row.budget.parameters,
            "tokens": row.budget.tokens,
            "flops": row.budget.flops,
            "seconds": row.budget.seconds,
            "tokens_per_second": row.tokens_per_second,
        }
        for row in judgement.rows
    ]
    return {
        "metric": judgement.measure.name,
        "headline": headline(judgement),
        "margin": judgement.margin,
        "notes": judgement.notes,
        "judged": judged,
        **payload,
    }


def finite_ends(interval: tuple[float, float] | None) -> list[float | None] | None:
    """An open end (infinity), known only to lie beyond zero, is null in JSON."""
    return None if interval is None else [end if math.isfinite(end) else None for end in interval]


def show_estimate(estimate: Estimate, signed: bool = False) -> str:
    """mean ± half of the interval with as many digits as the interval allows."""
    if estimate.n == 0 and estimate.method != "no shared seed":
        return "—"
    half = estimate.half_width
    sign = "+" if signed else ""
    if half is None or half == 0:
        kept = "#" if 1e-4 <= abs(estimate.mean) < 1000 else ""  # 8.000, not 8: four digits were measured
        return f"{estimate.mean:{sign}{kept}.4g}".replace("-", "−")
    # Two digits of the uncertainty are all that it can carry.
    digits = max(0, -int(f"{half:.1e}".partition("e")[2]) + 1)
    mean = round(estimate.mean, digits) + 0.0  # −0.000 has no sign
    return f"{mean:{sign if mean else ''}.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def _so_far(estimate: Estimate) -> str:
    return f"{estimate.mean:.3g} so far" if estimate.n else "—"


def show_count(number: float | None) -> str:
    """1.18 M, 17.8 T, or — when it is not known."""
    if number is None:
        return "—"
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def _fitted(table: Table, width: int) -> list[str]:
    """The table in as many stacked pieces as the width needs; each repeats the first column, long labels wrap."""
    labels = [textwrap.wrap(row[0], max(12, width // 3), break_on_hyphens=False) or [""] for row in table.rows]
    first = max(len(line) for lines in [[table.columns[0]], *labels] for line in lines)
    pieces: list[list[int]] = [[]]
    room = width - first
    for index in range(1, len(table.columns)):
        needs = 2 + max(len(row[index]) for row in [table.columns, *table.rows])
        if needs > room and pieces[-1]:
            pieces.append([])
            room = width - first
        pieces[-1].append(index)
        room -= needs
    text: list[str] = []
    for piece in pieces:
        rows = [[table.columns[0], *(table.columns[i] for i in piece)]]
        rows.append(["─" * first, *("─" * max(len(row[i]) for row in [table.columns, *table.rows]) for i in piece)])
        for lines, row in zip(labels, table.rows):
            rows.append([lines[0], *(row[i] for i in piece)])
            rows += [[line, *("" for _ in piece)] for line in lines[1:]]
        text += ([""] if text else []) + aligned(rows)
    return text


def latex_report(judgement: Judgement) -> str:
    """The final table for a paper: means and differences with their 95 % intervals, the protocol in the caption."""
    measure = judgement.measure
    judged = [row.comparison for row in judgement.rows if row.comparison is not None]
    against = {c.baseline for c in judged}
    head = ["Model", "Seeds", "Parameters", "FLOPs", f"{measure.title.capitalize()} ({measure.split})"]
    head += ["Difference (95\\,\\% interval)", "$p$ (Holm)", "Verdict"]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{_latex(protocol_caption(judgement))}}}",
        "  \\begin{tabular}{lrrrrrrl}",
        "    \\toprule",
        f"    {' & '.join(head)} \\\\",
        "    \\midrule",
    ]
    for row in judgement.rows:
        c, mean = row.comparison, show_estimate(row.estimates[measure.name])
        cells = [_latex(row.group.label), str(row.estimates[measure.name].n), show_count(row.budget.parameters)]
        cells += [show_count(row.budget.flops), f"${mean.replace('±', PLUS_MINUS)}$".replace("−", "-")]
        cells += ["" if c is None else f"${latex_difference(c.difference)}$"]
        p = None if c is None else c.p_adjusted
        cells += ["" if p is None else "$<0.001$" if p < 0.001 else f"${p:.3f}$"]
        lines.append(f"    {' & '.join([*cells, _latex(row.outcome)])} \\\\")
    label = "tab:comparison" if len(against) != 1 else f"tab:against-{against.pop()}".replace(" ", "-")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", f"  \\label{{{label}}}", "\\end{table}", ""])


PLUS_MINUS = "\\pm"


def latex_difference(difference: Estimate) -> str:
    """-0.109 [-0.120, -0.099]: the mean and both ends, with as many digits as the interval carries."""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4g}"
    half = (difference.high - difference.low) / 2
    digits = max(0, -int(f"{half:.1e}".partition("e")[2]) + 1) if half else 4
    mean, low, high = (f"{value:+.{digits}f}" for value in (difference.mean, difference.low, difference.high))
    return f"{mean}\\;[{low}, {high}]"


def protocol_caption(judgement: Judgement) -> str:
    """How the numbers came about, in two or three sentences, for a table or a figure of a paper."""
    groups = [row.group for row in judgement.rows]
    baselines = list(dict.fromkeys(row.comparison.baseline for row in judgement.rows if row.comparison is not None))
    measure = judgement.measure
    direction = "lower" if measure.lower_is_better else "higher"
    words = [f"{measure.title.capitalize()} on the {measure.split} split ({direction} is better), mean over seeds."]
    if baselines:
        words.append(
            f"Differences are against {' and '.join(baselines)} on paired seeds with 95 % intervals (paired t); "
            "p is corrected for all comparisons of the table (Holm)."
        )
    if judgement.margin:
        words.append(f"Differences below {judgement.margin:.3g} {measure.unit} are treated as negligible.")
    if shared := shared_caption(groups):
        words.append(shared)
    return " ".join(words)


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "·": r"$\cdot$", "−": "$-$", "±": r"$\pm$", "Δ": r"$\Delta$"}
    special |= {c: "\\" + c for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, c) for c in text)
