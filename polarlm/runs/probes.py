"""diagnostics/probe.jsonl: what the probe saw inside a run, thinned over time."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.runs.metrics import is_object

# What a trajectory needs; the newest probe is always among them.
MAX_PROBES = 40


@dataclass(frozen=True)
class StoredProbe:
    """One look inside a run: arrays of shape (), (layers,), (layers + 1,) or (layers, heads), and lag profiles."""

    step: float
    tokens: float
    layers: int
    values: dict[str, np.ndarray]
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_probes(path: Path, max_probes: int = MAX_PROBES) -> tuple[list[StoredProbe], int]:
    """At most `max_probes` probes in order of steps (newest included) and the number of unreadable lines."""
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return [], 0
    unreadable = 0
    if lines and not is_object(lines[-1]):  # being written, or cut off by a kill
        lines.pop()
        unreadable += 1
    if not lines:
        return [], unreadable
    probes: dict[float, StoredProbe] = {}
    for index in np.unique(np.linspace(0, len(lines) - 1, min(max_probes, len(lines))).round().astype(int)):
        try:
            probe = _parse(json.loads(lines[index]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            unreadable += 1
            continue
        probes[probe.step] = probe  # a continued run may repeat a step: the later line counts
    return [probes[step] for step in sorted(probes)], unreadable


def _parse(row: dict[str, Any]) -> StoredProbe:
    values = {name: _array(value) for name, value in row["values"].items() if value is not None}
    profiles = {}
    for name, profile in (row.get("profiles") or {}).items():
        x, y = _array(profile["x"]), _array(profile["y"])
        if y.shape[-1:] == x.shape:
            profiles[name] = {"x": x, "y": y, "xlabel": str(profile.get("xlabel", "lag"))}
    return StoredProbe(float(row["step"]), float(row["tokens"]), int(row["layers"]), values, profiles)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=float)  # None inside a list (a nan or inf that JSON does not know) becomes nan
