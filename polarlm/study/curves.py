"""What eval.py and the probes found, as tables: means over the seeds of each variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from polarlm.report.records import RecordCurve, curves_of, protocol_words
from polarlm.study.judge import JudgedPart, Line
from polarlm.verdict.estimates import estimate_mean


def curve_tables(judged: JudgedPart) -> Iterator[str]:
    """One table per curve and protocol (more text is another protocol): variants down, places across."""
    by_name: dict[tuple[str, str], dict[str, list[RecordCurve]]] = {}
    for line in judged.lines:
        for row in line.rows:
            for record in row.get("evaluations") or []:
                for curve in curves_of(record):
                    by_name.setdefault((curve.name, protocol_words(record)), {}).setdefault(line.variant, []).append(
                        curve
                    )
    for key in sorted(by_name):
        variants = by_name[key]
        first = next(iter(variants.values()))[0]
        if first.diagonal:  # calibration: its places differ from run to run
            continue
        head = [f"{first.y_label} by {first.x_label} ({key[1]})", *(f"{x:g}" for x in first.x)]
        rows = [head, ["---"] * len(head)]
        for variant, curves in variants.items():
            cells = [_cell([_at(curve, x) for curve in curves]) for x in first.x]
            rows.append([f"`{variant}`", *cells])
        yield markdown_table(rows)


def probe_tables(judged: JudgedPart, names: Sequence[str]) -> Iterator[str]:
    """One table per diagnostic: variants down, layers across."""
    for name in names:
        rows: list[list[str]] = []
        for line in judged.lines:
            values = _probe(line, name)
            if values:
                rows.append([f"`{line.variant}`", *(_cell(list(layer)) for layer in zip(*values))])
        if rows:
            layers = max(len(row) for row in rows) - 1
            head = [f"`{name}`", *(str(layer + 1) for layer in range(layers))]
            yield markdown_table([head, ["---"] * len(head), *rows])


def _probe(line: Line, name: str) -> list[list[float]]:
    return [row["probes"][name] for row in line.rows if name in (row.get("probes") or {})]


def _at(curve: RecordCurve, x: float) -> float | None:
    return dict(zip(curve.x, curve.y)).get(x)


def _cell(values: Sequence[Any]) -> str:
    known = [v for v in values if isinstance(v, (int, float))]
    if not known:
        return "–"
    estimate = estimate_mean(known)
    half = estimate.half_width
    return f"{estimate.mean:.4g}" + (f" ± {half:.2g}" if half is not None else "")


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the second being the rule, as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
