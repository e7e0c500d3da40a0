"""Numbers in the hand-written paragraphs: `{difference characters/polar}` is replaced by the number of the rows.

A paragraph cannot disagree with the table below it, because both read the same rows:

{difference part/variant}             mean difference from the part's baseline, with its 95 % interval
{gap part/variant}                    the size of that difference, without sign and interval
{signed part/variant}                 that difference with its sign, without interval
{value part/variant}                  mean of the part's metric
{gain part/variant CURRENCY}          times the budget that the baseline needs for the same loss: FLOPs, seconds
{probe part/variant NAME [LAYER]}     a diagnostic: smallest to largest mean over seeds by layer, from LAYER (1) on
{length part/variant FACTOR}          bits per byte at a multiple of the trained context
{corruption part/variant KIND RATE}   nats per token with a share of the context replaced

A part of another question is named with it: baselines:characters/polar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polarlm.errors import UserError
from study.judge import JudgedPart, Line

Numbers = Mapping[str, Mapping[str, JudgedPart | None]]  # question → part → what was judged


def fill(text: str, numbers: Numbers, question: str = "") -> str:
    """The text with every number in braces replaced."""

    def replaced(match: re.Match[str]) -> str:
        kind, place, *more = match.group(1).split()
        try:
            return KINDS[kind](find(place, numbers, question), *more)
        except (KeyError, StopIteration, TypeError, IndexError, ValueError):
            raise UserError(f"docs/study: {match.group(0)} does not match any row") from None

    return re.sub(r"\{([^{}]+)\}", replaced, text)


def find(place: str, numbers: Numbers, question: str) -> Line:
    """The line that `question:part/variant` or `part/variant` names."""
    before, colon, after = place.partition(":")
    part, _, variant = (after if colon else before).partition("/")
    judged = numbers[before if colon else question][part]
    if judged is None:
        raise KeyError(place)
    return next(line for line in judged.lines if line.variant == variant)


def mean_difference(line: Line) -> float:
    """Variant minus baseline."""
    if line.comparison is None:
        raise KeyError(line.variant)
    return line.comparison.difference.mean


def difference(line: Line) -> str:
    """`−0.109 (95 % interval −0.120 to −0.099)`."""
    mean_difference(line)
    d = line.comparison.difference  # type: ignore[union-attr]
    mean, low, high = (f"{end:+.3f}".replace("-", "−") for end in (d.mean, d.low, d.high))
    return f"{mean} (95 % interval {low} to {high})"


def gain(line: Line, currency: str) -> str:
    """`1.32 times (1.19–1.46)`."""
    wanted = ("processor seconds", "seconds") if currency == "seconds" else (currency,)
    factor = next(gain.factor for gain in line.gains if gain.currency in wanted)
    between = f" ({factor.low:.2f}–{factor.high:.2f})" if factor.low is not None and factor.high is not None else ""
    return f"{factor.mean:.2f} times{between}"


def probe(line: Line, name: str, first: str = "1") -> str:
    """`0.41–0.68`: the range over layers."""
    layers = probe_means(line, name)[int(first) - 1 :]
    low, high = (f"{end:.2g}".replace("-", "−") for end in (min(layers), max(layers)))
    return low if low == high else f"{low} to {high}" if "−" in low else f"{low}–{high}"


def probe_means(line: Line, name: str) -> list[float]:
    """The diagnostic of every layer, averaged over seeds."""
    return [_mean(layer) for layer in zip(*(row["probes"][name] for row in line.rows))]


def length_curve(line: Line) -> dict[int, float]:
    """Multiple of the trained context → bits per byte, averaged over seeds."""
    curves = [record["by_length"] for row in line.rows for record in row["evaluations"] if "by_length" in record]
    return {
        int(factor): _mean([curve["metrics"][i]["bits_per_byte"] for curve in curves])
        for i, factor in enumerate(curves[0]["factor"])
    }


def corruption(line: Line, kind: str, rate: str) -> str:
    """Loss where a share of the context is replaced."""
    curves = [
        record["by_corruption"] for row in line.rows for record in row["evaluations"] if "by_corruption" in record
    ]
    return f"{_mean([curve[kind]['loss'][curve['rate'].index(float(rate))] for curve in curves]):.2f}"


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)


KINDS: Mapping[str, Callable[..., str]] = {
    "difference": difference,
    "gap": lambda line: f"{abs(mean_difference(line)):.3f}",
    "signed": lambda line: f"{mean_difference(line):+.3f}".replace("-", "−"),
    "value": lambda line: f"{line.mean.mean:.3f}",
    "gain": gain,
    "probe": probe,
    "length": lambda line, factor: f"{length_curve(line)[int(factor)]:.3f}",
    "corruption": corruption,
}
