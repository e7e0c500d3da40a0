"""The small files of a run folder, written so that a kill leaves nothing half-done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polarlm.data.atomic import write_beside


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, making its folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file, or None when it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
