"""The report as one HTML file that opens anywhere, offline: data, styles, script and plotting library inside."""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import polarlm
from polarlm.report.captions import block_caption, shared_caption, usual_caption
from polarlm.report.payload import link_to
from polarlm.report.records import answers_table, numbers_table
from polarlm.report.tables import Table, difference_table, results_table, show_count
from polarlm.runs.files import write_text
from polarlm.runs.reading import Run
from polarlm.verdict.groups import ABSENT, Group
from polarlm.verdict.headline import headline
from polarlm.verdict.judgement import CLOCKS, UNEQUAL, Judged, Judgement
from polarlm.verdict.sentences import reference_losses

LONG, FEW = 15, 3  # rows
LONGEST_SAMPLE = 700  # characters
SCRIPTS = (
    "state.js",
    "figures.js",
    "verdicts.js",
    "curves.js",
    "records.js",
    "geometry.js",
    "start.js",
)  # in this order


def write_page(groups: Sequence[Group], judgement: Judgement, payload: dict[str, Any], out: Path) -> Path:
    """Write the report atomically: a reader (or a reloading browser) sees the old page or the new one."""
    write_text(out, render_page(groups, judgement, payload, out))
    return out


def render_page(groups: Sequence[Group], judgement: Judgement, payload: dict[str, Any], out: Path | None = None) -> str:
    """The page's text. Whatever comes from a run folder is escaped or travels as compressed JSON."""
    finding = headline(judgement)
    verdicts = [_verdict(row) for row in judgement.rows if row.outcome != "baseline"]
    return Template(_asset("page.html")).substitute(
        title=escape(f"polarlm: {finding}"),
        css=_asset("page.css"),
        headline=_words(finding),
        meta=escape(_meta(groups, payload)),
        shared=escape(" ".join(filter(None, (say(groups) for say in (shared_caption, block_caption, usual_caption))))),
        final_table=_html(results_table(judgement), judgement),
        final_caption=_words(_final_caption(groups, judgement)),
        verdicts=_folded(f"<ul>{''.join(verdicts)}</ul>", len(verdicts), "verdicts in words")
        if len(groups) > 1
        else "",
        notes="".join(f'<p class="note">{_words(note)}</p>' for note in judgement.notes),
        difference_table=_differences(groups),
        evaluated=_evaluated(groups),
        samples=_samples(groups),
        progress=_progress(groups),
        run_table=_run_table(groups, judgement, out),
        footer=escape(f"Made by polarlm {polarlm.__version__} on {payload['created']} with plotly.js."),
        plotly=_plotly(),
        payload=_packed(json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()),
        script="\n".join(_asset(name) for name in SCRIPTS),
    )


@cache
def _asset(name: str) -> str:
    return (resources.files("polarlm.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js from its own Python package; compressed it takes 2 MB of the page instead of 5."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _packed(data: bytes) -> str:
    # mtime=0: the same runs give the same bytes.
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()


def _meta(groups: Sequence[Group], payload: dict[str, Any]) -> str:
    runs = [run for group in groups for run in group.runs]
    words = [f"{len(runs)} run{'s' * (len(runs) > 1)} in {len(groups)} group{'s' * (len(groups) > 1)}"]
    return " · ".join([*words, f"written {payload['created'].replace('T', ' ')}"])


def _words(text: str) -> str:
    """Text as HTML; no line begins with a percent sign."""
    return escape(text).replace(" %", "&nbsp;%")


def _verdict(row: Judged) -> str:
    """The claim, with its evidence and cost folded away."""
    claim, *rest = (_words(part) for part in row.parts)
    more = f" <details><summary>evidence and cost</summary> {' '.join(rest)}</details>" if rest else ""
    return f"<li>{claim}{more}</li>"


def _final_caption(groups: Sequence[Group], judgement: Judgement) -> str:
    words = f"Final numbers on the {judgement.measure.split} split, mean over seeds ± half of the 95 % interval. "
    words += "Δ is the mean difference on paired seeds; p is corrected for the number of comparisons (Holm)."
    words += f" Seconds are {CLOCKS[judgement.clock]}."
    if any(row.role == UNEQUAL for row in judgement.rows):
        words += " Grey rows have unequal budgets and are not judged."
    return words + _for_scale(groups, judgement)


def _for_scale(groups: Sequence[Group], judgement: Judgement) -> str:
    words = [f"{name} {loss:.4g}" for name, loss in reference_losses(groups, judgement.measure.key).items()]
    return f" Simple baselines, validation {judgement.measure.title}: {', '.join(words)}." if words else ""


def _html(table: Table, judgement: Judgement) -> str:
    verdict_column = table.columns.index("verdict")
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = []
    for index, row in enumerate(table.rows):
        label = escape(row[0]).replace(" · ", "&nbsp;· ")  # in a narrow window no line is a dot alone
        first = f'<td><span class="swatch" data-swatch="{index}"></span>{label}</td>'
        kind = f' class="{row[verdict_column]}"' if row[verdict_column] in ("better", "worse") else ""
        cells = ""
        for column, (name, cell) in enumerate(zip(table.columns[1:], row[1:]), start=1):
            style = kind if column == verdict_column else ""
            whole = escape(cell).replace("± ", "±&nbsp;")  # in a narrow window a line ends before ±, not after it
            cells += f'<td{style} data-label="{escape(name, quote=True)}">{whole}</td>'
        grey = ' class="unequal"' if judgement.rows[index].role == UNEQUAL else ""
        body.append(f"<tr{grey}>{first}{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _evaluated(groups: Sequence[Group]) -> str:
    tables = [table for table in (numbers_table(groups), answers_table(groups)) if table is not None]
    html = ""
    for table in tables:
        rows = [[escape(cell) for cell in row] for row in table.rows]
        html += _folded(_left_table(table.columns, rows), len(rows), "evaluated numbers")
    return html


def _differences(groups: Sequence[Group]) -> str:
    table = difference_table(groups)
    if not table.rows:
        return '<p class="meta">Only the seed.</p>'
    # What only one of two blocks has is no difference between them: the reader wants the others at a glance.
    partial = [row for row in table.rows if row[0].startswith("block.") and ABSENT in row]
    shared = [row for row in table.rows if row not in partial]
    if len(partial) <= FEW:
        shared, partial = table.rows, []
    tables = [
        _left_table(table.columns, [[escape(cell) for cell in row] for row in rows]) for rows in (shared, partial)
    ]
    fold = f"<details><summary>{len(partial)} settings that only some of the blocks have</summary>{tables[1]}</details>"
    return tables[0] + (fold if partial else "")


def _run_table(groups: Sequence[Group], judgement: Judgement, out: Path | None) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            address = escape(link_to(run.folder, out), quote=True)
            extra = [name for name in ("summary.png", "config.yaml", "metrics.jsonl") if (run.folder / name).exists()]
            links = " ".join(f'<a href="{address}{name}">{name}</a>' for name in extra)
            loss = run.number(judgement.measure.name)
            cells = [group.label, str(run.seed), run.status, "—" if loss is None else f"{loss:.4g}"]
            cells += [show_count(run.number("tokens")), show_count(run.number("seconds"))]
            rows.append([f'<a href="{address}">{escape(run.name)}</a>', *map(escape, cells), links])
    columns = ["run", "group", "seed", "status", judgement.measure.unit, "tokens", "seconds", "files"]
    return _folded(_left_table(columns, rows), len(rows), "runs")


def _samples(groups: Sequence[Group]) -> str:
    """What a run of each group writes, side by side; of the lowest seed that all groups have where there is one."""
    having = [(g, runs) for g in groups if (runs := [run for run in g.runs if _sample(run)])]
    shared = set.intersection(*({run.seed for run in runs} for _, runs in having)) if having else set()
    cards = []
    for group, runs in having:
        run = next((r for r in runs if shared and r.seed == min(shared)), runs[0])
        text = _sample(run)
        shown = text[:LONGEST_SAMPLE] + ("…" if len(text) > LONGEST_SAMPLE else "")
        cards.append(
            f'<div class="sample"><h3>{escape(group.label)} <small>seed {run.seed}</small></h3>'
            f"<blockquote>{escape(shown)}</blockquote></div>"
        )
    if not cards:
        return ""
    options = groups[0].runs[0].settings
    words = [f"temperature {options['sample.temperature']}"] if "sample.temperature" in options else []
    words += [f"top-k {options['sample.top_k']}"] if options.get("sample.top_k") else []
    words += [f"prompt “{options['sample.prompt']}”"] if options.get("sample.prompt") else []
    note = f'<p class="lead">Written at the end of training{escape(": " + ", ".join(words) if words else "")}.</p>'
    return f'<section id="samples"><h2>Samples</h2>{note}<div class="samples">{"".join(cards)}</div></section>'


def _progress(groups: Sequence[Group]) -> str:
    """A bar per unfinished run and a count of all; nothing when everything is finished."""
    runs = [run for group in groups for run in group.runs]
    open_ = [run for run in runs if run.status != "finished"]
    if not open_:
        return ""
    rows = []
    for run in open_:
        share, left = _share_done(run)
        words = f"{100 * share:.0f} %" if share is not None else "—"
        if left is not None and run.status == "running":
            words += f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
        bar = f'<progress max="1" value="{share or 0:.3f}" aria-label="{escape(run.name, quote=True)}"></progress>'
        rows.append(f"<tr><td>{escape(run.name)}</td><td>{escape(run.status)}</td><td>{bar}</td><td>{words}</td></tr>")
    done = sum(run.status == "finished" for run in runs)
    head = f"{done} of {len(runs)} runs finished"
    table = f'<div class="scroll"><table class="left progress"><tbody>{"".join(rows)}</tbody></table></div>'
    return f'<section id="progress"><h2>Sweep progress</h2><p class="lead">{head}.</p>{table}</section>'


def _share_done(run: Run) -> tuple[float | None, float | None]:
    """(share done, seconds left) as far as they can be told."""
    steps, tokens = run.settings.get("trainer.max_steps"), run.settings.get("trainer.max_tokens")
    at = run.number("tokens") if tokens else None
    goal: float | None = float(tokens) if tokens else None
    if goal is None and isinstance(steps, (int, float)) and len(run.metrics):
        goal, at = float(steps), float(run.metrics.columns["step"][-1])
    if not goal or at is None:
        return None, None
    share, seconds = min(1.0, at / goal), run.number("seconds")
    return share, seconds * (1 - share) / share if seconds and share else None


def _sample(run: Run) -> str:
    text = run.summary.get("sample")
    return text if isinstance(text, str) else ""


def _folded(html: str, count: int, what: str) -> str:
    """Long lists are folded away, short ones are not."""
    return html if count <= LONG else f"<details><summary>{count} {what}</summary>{html}</details>"


def _left_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    labels = [escape(name, quote=True) for name in columns]
    lines = ["".join(f'<td data-label="{label}">{cell}</td>' for label, cell in zip(labels, row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="left"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
