"""Results of `eval.py` in the run folders: curves (position, length, corruption, calibration …) and numbers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.evaluation.metrics import METRICS
from polarlm.report.tables import Table, show_estimate
from polarlm.runs.files import json_object
from polarlm.runs.measurements import FOLDER
from polarlm.verdict.evidence import estimate_mean
from polarlm.verdict.groups import Group

LOSS = "loss (nats per token)"
# What identifies a question besides its name; the rest of a protocol (weights, fingerprints) is not for reading.
SAID = ("data", "split", "context", "stride", "tokens")


@dataclass(frozen=True)
class RecordCurve:
    """One curve of a record, ready to draw."""

    name: str
    title: str
    x: list[float]
    y: list[float]
    x_label: str
    y_label: str = LOSS
    x_log: bool = False
    diagonal: bool = False  # draw y = x

    def __post_init__(self) -> None:
        if not all(_is_number(value) for value in (*self.x, *(self.y if self.diagonal else ()))):
            raise TypeError(f"{self.name} has points that are no numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _position(record: dict[str, Any]) -> Iterator[RecordCurve]:
    part = record["by_position"]
    yield RecordCurve(
        "position", "Loss by position", part["to"], part["loss"], "tokens read before the target", x_log=True
    )


def _frequency(record: dict[str, Any]) -> Iterator[RecordCurve]:
    part, label = record["by_frequency"], "times that the target occurs in the training text, at most"
    known = [i for i, most in enumerate(part["to"]) if most and most > 0]
    x, y = ([part[key][i] for i in known] for key in ("to", "loss"))
    yield RecordCurve("frequency", "Loss by frequency of the target", x, y, label, x_log=True)


def _length(record: dict[str, Any]) -> Iterator[RecordCurve]:
    part = record["by_length"]
    bits = [metrics.get("bits_per_byte") for metrics in part["metrics"]]
    title = "Bits per byte at lengths beyond the trained one"
    yield RecordCurve("length", title, part["context"], bits, "context (tokens)", "bits per byte", x_log=True)
    longest, factor = part["by_position"][-1], part["factor"][-1]
    if factor > 1:
        title = f"Loss by position, {factor} × the trained context"
        label = f"tokens read before the target (trained: {part['context'][-1] // factor})"
        yield RecordCurve("length, by position", title, longest["to"], longest["loss"], label, x_log=True)


def _corruption(record: dict[str, Any]) -> Iterator[RecordCurve]:
    part = record["by_corruption"]
    for kind, curves in part.items():
        if isinstance(curves, dict):
            label = f"share of {kind} tokens in the context"
            yield RecordCurve(
                f"corruption, {kind}", f"Loss with {kind} tokens in the context", part["rate"], curves["loss"], label
            )


def _calibration(record: dict[str, Any]) -> Iterator[RecordCurve]:
    part = record["calibration"]["reliability"]
    x, y = part["probability"], part["frequency"]
    title = "Calibration: how often the most likely token comes"
    yield RecordCurve("calibration", title, x, y, "probability given to it", "how often it came", diagonal=True)


CURVES: dict[str, Callable[[dict[str, Any]], Iterator[RecordCurve]]] = {
    "length": _length,
    "position": _position,
    "corruption": _corruption,
    "frequency": _frequency,
    "calibration": _calibration,
}

# Numbers of the protocols that answer with something else than the metrics: (where they stand, how they are called).
SPEARMAN = "Spearman's correlation, mean over layers"
NUMBERS: dict[str, tuple[tuple[str, str], ...]] = {
    "blimp": (
        ("blimp.accuracy", "BLiMP accuracy"),
        ("blimp.accuracy_of_paradigms", "BLiMP accuracy, mean of paradigms"),
    ),
    "lambada": (
        ("lambada.accuracy", "LAMBADA accuracy"),
        ("lambada.target_log_likelihood", "LAMBADA log-likelihood of the last word"),
    ),
    "calibration": (
        ("calibration.ece", "calibration error of the most likely token"),
        ("calibration.full_ece", "calibration error of the whole distribution"),
    ),
    "shuffled": (
        ("control.gain_over_bigram", "gain over the bigram (nats per token)"),
        ("control.gain_over_bigram_shuffled", "the same with shuffled documents (control: not above 0)"),
    ),
    "confidence": tuple(
        (f"confidence.{signal}_{outcome}.spearman", f"{name} with {outcome}: {SPEARMAN}")
        for signal, name in (("magnitude", "log m"), ("log_evidence", "log-evidence"))
        for outcome in ("loss", "entropy")
    ),
}


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every readable record of a run, oldest first."""
    paths = sorted((folder / FOLDER).glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name))
    records = [json_object(path) for path in paths]  # one may be being written
    return [record for record in records if isinstance(record.get("protocol"), dict)]


def _newest(
    groups: Sequence[Group], read: Callable[[dict[str, Any]], Iterable[tuple[Any, Any]]]
) -> dict[tuple[Any, int], list[Any]]:
    """(key, group) → what `read` gives for the key, of each run of the group; of several records the newest counts."""
    values: dict[tuple[Any, int], list[Any]] = {}
    for index, group in enumerate(groups):
        for run in group.runs:
            newest = {key: value for record in read_records(run.folder) for key, value in read(record)}
            for key, value in newest.items():
                values.setdefault((key, index), []).append(value)
    return values


def curve_panels(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One panel per curve and protocol: the mean over the seeds of each group, at the points that all of them have."""
    panels: dict[tuple[str, str], dict[str, Any]] = {}
    lines = _newest(
        groups, lambda record: (((curve.name, protocol_words(record)), curve) for curve in curves_of(record))
    )
    for (key, index), curves in lines.items():
        panel = panels.setdefault(key, _panel(curves[0], key[1]))
        panel["lines"].append({"group": index, **_mean(curves)})
    order = list(CURVES)
    return [panels[key] for key in sorted(panels, key=lambda k: (order.index(k[0].partition(",")[0]), *k))]


def numbers_table(groups: Sequence[Group]) -> Table | None:
    """The metrics of every protocol that gives any, one row per protocol and group; None when nothing was evaluated."""

    def metrics_of(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
        if isinstance(record.get("metrics"), dict):
            yield f"{record['protocol'].get('name')}: {protocol_words(record)}", record["metrics"]

    by_group = _newest(groups, metrics_of)
    if not by_group:
        return None
    shown = [m for m in METRICS if any(m.name in metrics for rows in by_group.values() for metrics in rows)]
    rows = []
    for (protocol, index), metrics in sorted(by_group.items()):
        cells = [show_estimate(estimate_mean([row.get(m.name) for row in metrics], log=m.is_log)) for m in shown]
        rows.append([protocol, groups[index].label, str(len(metrics)), *cells])
    return Table(["protocol", "group", "seeds", *(m.title for m in shown)], rows)


def answers_table(groups: Sequence[Group]) -> Table | None:
    """Downstream accuracies, calibration, the negative control, confidence: a row per quantity, a column per group."""

    def answers_of(record: dict[str, Any]) -> Iterator[tuple[tuple[str, str], float | None]]:
        for place, title in NUMBERS.get(str(record["protocol"].get("name")), ()):
            yield (title, protocol_words(record)), _number_at(record, place)

    by_group = _newest(groups, answers_of)
    known = {key: values for key, values in by_group.items() if any(value is not None for value in values)}
    if not known:
        return None
    order = [title for numbers in NUMBERS.values() for _, title in numbers]
    shown = sorted({index for _, index in known})
    rows = []
    for title, said in sorted({key for key, _ in known}, key=lambda key: (order.index(key[0]), key[1])):
        cells = [known.get(((title, said), index)) for index in shown]
        rows.append([title, said, *("—" if cell is None else show_estimate(estimate_mean(cell)) for cell in cells)])
    return Table(["quantity", "protocol", *(groups[index].label for index in shown)], rows)


def _number_at(record: dict[str, Any], place: str) -> float | None:
    """The number (the mean of a list) at a dotted place; None where a record has none."""
    value: Any = record
    for part in place.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, list):
        known = [v for v in value if isinstance(v, (int, float))]
        value = float(np.mean(known)) if known else None
    return float(value) if isinstance(value, (int, float)) else None


def curves_of(record: dict[str, Any]) -> list[RecordCurve]:
    """Everything in a record that can be drawn."""
    make = CURVES.get(str(record["protocol"].get("name")))
    try:
        return list(make(record)) if make else []
    except (KeyError, TypeError, IndexError, AttributeError):
        return []  # a record of another version


def protocol_words(record: dict[str, Any]) -> str:
    """The settings that tell one protocol from another, in words; numbers of different ones are not averaged."""
    protocol = record["protocol"]
    return ", ".join(f"{k} {protocol[k]}" for k in SAID if isinstance(protocol.get(k), (str, int, float)))


def _panel(curve: RecordCurve, protocol: str) -> dict[str, Any]:
    return {
        "name": curve.name,
        "title": curve.title,
        "x": curve.x_label,
        "y": curve.y_label,
        "log": curve.x_log,
        "diagonal": curve.diagonal,
        "protocol": protocol,
        "lines": [],
    }


def _mean(curves: Sequence[RecordCurve]) -> dict[str, Any]:
    """Mean and range over seeds, at the x that all have; calibration has other x in every run and is taken by place."""
    if curves[0].diagonal:
        longest = min(len(c.x) for c in curves)
        at = np.mean([c.x[:longest] for c in curves], axis=0).tolist()
        values = np.array([c.y[:longest] for c in curves], dtype=float)
    else:
        tables = [{float(x): y for x, y in zip(c.x, c.y) if _is_number(y)} for c in curves]
        at = sorted(set.intersection(*(set(t) for t in tables)))
        values = np.array([[table[x] for x in at] for table in tables], dtype=float).reshape(len(tables), len(at))

    def rounded(row: np.ndarray) -> list[float]:
        return [float(f"{v:.5g}") for v in row]

    ends = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {"at": rounded(np.asarray(at)), "n": len(curves), **{name: rounded(row) for name, row in ends.items()}}
