"""incidents.json of a run folder: steps that went wrong, and what was done about them (training/incidents.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.files import read_json

FILE = "incidents.json"


def detours(folder: Path) -> list[tuple[int, int]]:
    """(after step, batches left out) of every rewind of a run, in order: which batches a step reads follows from it."""
    known = read_incidents(folder)
    try:
        return sorted((int(i["after_step"]), int(i["skipped_batches"])) for i in known if i["action"] == "rewind")
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder / FILE} is damaged; restore it from a copy") from None


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """The record of a run; a damaged one is a UserError, because which batches come next follows from it."""
    file = folder / FILE
    known = read_json(file, list)
    if known is None:
        return []
    if not all(isinstance(one, dict) and "action" in one for one in known):
        raise UserError(f"{file} is damaged; restore it from a copy")
    return known
