"""docs/study/<question>.json: every run of a question as a row.

Values that several rows share are stored once, so that files are small and differences easy to see:

{"question": …,
 "settings": {of all runs}, "parts": {part: {"settings": {of its runs}, "variants": {variant: {its own}}}},
 "groups": [{"part": …, "variant": …, "stage": …, what its rows share, "runs": [{the rest of a row}, …]}, …]}

A group that two parts share is stored in one of them; the other names it ("same_as").
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.errors import UserError
from polarlm.runs.files import read_json, write_text
from polarlm.runs.measurements import AXES, Metrics
from polarlm.runs.reading import Run
from study.plan import Question

GROUP = ("part", "variant", "stage")
OWN = ("value", "seed", "identity", "command")  # stay with a row, also with an only one
ENDS = "with"  # how a row's command ends


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
        everywhere = _shared(list(self.settings.values()))
        parts = {}
        for part in [*question.parts, *sorted({p for p, _ in self.settings} - set(question.parts))]:
            variants = {
                variant: _without(dict(sorted(values.items())), everywhere)
                for (p, variant), values in self.settings.items()
                if p == part
            }
            if variants:
                shared = _shared(list(variants.values()))
                order = _ordered(variants, question.parts[part].variants if part in question.parts else ())
                parts[part] = {"settings": shared, "variants": {v: _without(variants[v], shared) for v in order}}
        lines = [f'{{"question": {_json(self.question)},', f'"settings": {_json(everywhere)},', '"parts": {']
        lines += [_comma(f"{_json(name)}: {_json(part)}", i, parts) for i, (name, part) in enumerate(parts.items())]
        groups = _grouped(sorted(self.rows, key=lambda row: _place(row, question)))
        lines += ["},", '"groups": [', ",\n".join(map(_group_text, groups)), "]}"]
        return "\n".join(line for line in lines if line) + "\n"


def read_summary(folder: Path, question: str) -> Summary:
    """What is known so far; empty where there is no file."""
    path = folder / f"{question}.json"
    stored = read_json(path)
    if stored is None:
        return Summary(question)
    try:
        settings = {
            (part, variant): {**stored["settings"], **entry["settings"], **changes}
            for part, entry in stored["parts"].items()
            for variant, changes in entry["variants"].items()
        }
        return Summary(str(stored["question"]), _rows(stored["groups"]), settings)
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


def _grouped(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one part, variant and stage as a group; of commands the words at the beginning are shared."""
    groups: list[dict[str, Any]] = []
    written: dict[str, str] = {}  # a group's text without its part → the part it was written for
    for (part, *_), together in itertools.groupby(rows, key=lambda row: [row[key] for key in GROUP]):
        members = list(together)
        words = [row["command"].split(" ") for row in members]
        columns = zip(*(line[:-1] for line in words), strict=False)
        begin = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
        shared = _shared([_without(row, OWN) for row in members], sort=False) | {"command": " ".join(begin)}
        runs = [
            _without(row, shared) | {ENDS: " ".join(line[len(begin) :])}
            for row, line in zip(members, words, strict=True)
        ]
        text = _json([_without(shared, ("part",)), runs])
        if text in written:
            groups.append({key: members[0][key] for key in GROUP} | {"same_as": written[text]})
        else:
            written[text] = part
            groups.append(shared | {"runs": runs})
    return groups


def _group_text(group: Mapping[str, Any]) -> str:
    if "runs" not in group:
        return _json(group)
    runs = ",\n".join(f" {_json(run)}" for run in group["runs"])
    return f'{_json(_without(group, ("runs",)))[:-1]}, "runs": [\n{runs}]}}'


def _rows(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were written as groups."""
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for group in groups:
        part, variant, stage = (group[key] for key in GROUP)
        whole = runs[group["same_as"], variant, stage] if "same_as" in group else group
        runs[part, variant, stage] = whole
        shared = {**_without(whole, ("runs",)), "part": part}
        for run in whole["runs"]:
            command = f"{whole['command']} {run[ENDS]}".strip()
            rows.append({**shared, **_without(run, (ENDS,)), "command": command})
    return rows


def _shared(members: list[dict[str, Any]], *, sort: bool = True) -> dict[str, Any]:
    first, *others = members or [{}]
    keys = sorted(first) if sort else list(first)
    return {k: first[k] for k in keys if all(k in other and _json(other[k]) == _json(first[k]) for other in others)}


def _without(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    left_out = set(keys)
    return {key: value for key, value in values.items() if key not in left_out}


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
