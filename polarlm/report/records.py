"""What `eval.py` left in a run folder (evaluations/*.json), as curves that the page can draw.

A record is a JSON object with `kind` (position, length, robustness, calibration, …), `protocol` and `curves`: name →
{"x": […], "y": […], "x_label": …, "y_label": …, "title": …}. Whatever has curves is drawn; a new kind needs no edit.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.verdict.groups import Group

FOLDER = "evaluations"
MOST_POINTS = 400


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every readable record of a run, oldest first."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being written
        if isinstance(record, dict):
            found.append(record)
    return found


def curve_panels(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One panel per named curve: the mean over the seeds of each group, at the points that all of them have."""
    panels: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(groups):
        found: dict[str, list[dict[str, Any]]] = {}
        for run in group.runs:
            newest = {
                f"{record.get('kind', 'evaluation')}/{name}": (curve, record)
                for record in read_records(run.folder)
                for name, curve in (record.get("curves") or {}).items()
                if _is_curve(curve)
            }
            for name, (curve, record) in newest.items():
                found.setdefault(name, []).append(curve)
                kind = str(record.get("kind", "evaluation"))
                panels.setdefault(name, _panel(name, kind, curve, record))
        for name, curves in found.items():
            panels[name]["lines"].append({"group": index, **_mean(curves)})
    return [panels[name] for name in sorted(panels)]


def _panel(name: str, kind: str, curve: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    protocol = record.get("protocol") if isinstance(record.get("protocol"), dict) else {}
    words = [f"{key} {value}" for key, value in (protocol or {}).items() if isinstance(value, (str, int, float))]
    said = kind if name == f"{kind}/{kind}" else name.replace("/", ": ")
    return {
        "name": name,
        "kind": kind,
        "title": str(curve.get("title") or said).replace("_", " "),
        "x": str(curve.get("x_label", "")),
        "y": str(curve.get("y_label", "")),
        "log": bool(curve.get("x_log", False)),
        "diagonal": bool(curve.get("diagonal", kind == "calibration")),
        "protocol": ", ".join(words),
        "lines": [],
    }


def _is_curve(curve: Any) -> bool:
    return isinstance(curve, dict) and isinstance(curve.get("x"), list) and len(curve["x"]) == len(curve.get("y") or [])


def _mean(curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and range over seeds where all have a value; numbers on the x axis only."""
    tables = [{float(x): y for x, y in zip(c["x"], c["y"]) if isinstance(y, (int, float))} for c in curves]
    common = sorted(set.intersection(*(set(t) for t in tables)))
    if len(common) > MOST_POINTS:
        common = [common[i] for i in np.unique(np.linspace(0, len(common) - 1, MOST_POINTS).astype(int))]
    values = np.array([[table[x] for x in common] for table in tables], dtype=float).reshape(len(tables), len(common))
    rounded = lambda row: [float(f"{v:.5g}") for v in row]  # noqa: E731
    return {
        "at": common,
        "mean": rounded(values.mean(0)),
        "low": rounded(values.min(0)),
        "high": rounded(values.max(0)),
        "n": len(tables),
    }
