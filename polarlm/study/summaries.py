"""docs/study/<question>.json: every run of a question as a row; settings stand once per part and variant.

{"question": …, "parts": {part: {"settings": {…}, "variants": {variant: {…}}}}, "rows": [{…}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.errors import UserError
from polarlm.runs.files import read_json, write_text
from polarlm.runs.metrics import AXES, Metrics
from polarlm.runs.reading import Run
from polarlm.study.plan import Question


@dataclass
class Summary:
    """The rows of one question with the settings that they were made with."""

    question: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # (part, variant) → dotted keys

    def add(self, row: dict[str, Any], settings: Mapping[str, Any] | None = None) -> bool:
        """Put a row in the place of an older one of the same job; True when it is new."""
        place = next((i for i, old in enumerate(self.rows) if _key(old) == _key(row)), None)
        if place is None:
            self.rows.append(row)
        else:
            self.rows[place] = row
        if settings is not None and row["stage"] == "seeds":
            self.settings[row["part"], row["variant"]] = dict(settings)
        return place is None

    def at(self, part: str, variant: str, stage: str) -> list[dict[str, Any]]:
        """The rows of one stage (tune or seeds) of a variant."""
        return [row for row in self.rows if (row["part"], row["variant"], row["stage"]) == (part, variant, stage)]

    def by_identity(self) -> dict[str, dict[str, Any]]:
        """identity → row of everything that ended."""
        return {row["identity"]: row for row in self.rows}

    def text(self, question: Question) -> str:
        """The file's text: stable order, one line per row."""
        parts = {}
        for part in [*question.parts, *sorted({p for p, _ in self.settings} - set(question.parts))]:
            variants = {variant: values for (p, variant), values in self.settings.items() if p == part}
            if variants:
                shared = _shared(list(variants.values()))
                differ = {
                    variant: {k: v for k, v in sorted(variants[variant].items()) if k not in shared}
                    for variant in _ordered(variants, question.parts[part].variants if part in question.parts else ())
                }
                parts[part] = {"settings": shared, "variants": differ}
        lines = [f'{{"question": {_json(self.question)},', '"parts": {']
        lines += [_comma(f"{_json(name)}: {_json(part)}", i, parts) for i, (name, part) in enumerate(parts.items())]
        lines += ["},", '"rows": [']
        rows = sorted(self.rows, key=lambda row: _place(row, question))
        lines += [_comma(_json(row), i, rows) for i, row in enumerate(rows)]
        return "\n".join([*lines, "]}"]) + "\n"


def read_summary(folder: Path, question: str) -> Summary:
    """What is known so far; empty where there is no file."""
    path = folder / f"{question}.json"
    stored = read_json(path)
    if stored is None:
        return Summary(question)
    try:
        settings = {
            (part, variant): {**entry["settings"], **changes}
            for part, entry in stored["parts"].items()
            for variant, changes in entry["variants"].items()
        }
        return Summary(str(stored["question"]), list(stored["rows"]), settings)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no summary of a study ({error!r}); restore it, or collect it again") from None


def write_summary(folder: Path, summary: Summary, question: Question) -> Path:
    """Write it whole or not at all."""
    path = folder / f"{question.name}.json"
    write_text(path, summary.text(question))
    return path


def as_run(row: Mapping[str, Any], settings: Mapping[str, Any], metric: str) -> Run:
    """A row as a run in memory, for the verdict: it sees what it would see in the run's folder."""
    config = unflatten({**settings, "seed": row["seed"]})
    curve = row.get("curve") or {}
    name = f"val/{metric.rpartition('/')[2]}"
    columns = {key: np.asarray(curve.get(key, ()), dtype=float) for key in (*AXES, name)}
    length = len(columns["step"])
    columns = {key: column if len(column) == length else np.full(length, np.nan) for key, column in columns.items()}
    summary = {**row, "name": f"{row['part']}/{row['variant']}/seed{row['seed']}"}
    tokenizer = json.dumps(config.get("tokenizer"), sort_keys=True)
    return Run(Path(summary["name"]), config, summary, Metrics(columns), [], str(row["status"]), tokenizer)


def unflatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a tree."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return tree


def _shared(settings: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = settings
    return {k: v for k, v in sorted(first.items()) if all(k in other and other[k] == v for other in others)}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("part", "variant", "stage", "value", "seed"))


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    known = list(order)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def _place(row: Mapping[str, Any], question: Question) -> tuple[Any, ...]:
    parts = list(question.parts)
    part = parts.index(row["part"]) if row["part"] in parts else len(parts)
    variants = list(question.parts[row["part"]].variants) if row["part"] in question.parts else []
    variant = variants.index(row["variant"]) if row["variant"] in variants else len(variants)
    return (part, row["part"], variant, row["variant"], row["stage"] == "seeds", row["value"] or 0.0, row["seed"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _comma(text: str, index: int, items: Any) -> str:
    return text + "," * (index < len(items) - 1)
