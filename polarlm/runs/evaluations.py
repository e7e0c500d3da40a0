"""What was found when a run was judged, kept in its folder: one record per protocol, for the report and for people.

evaluations/<protocol>-<data>-<split>-<digest>.json   {"protocol": {…}, "numbers": {…}, …}
evaluations/….npz                                     arrays that belong to it (losses of every document)
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import allowed_in_memory, explained, replacing, require_allowed
from polarlm.errors import UserError
from polarlm.runs.files import read_json, write_json

FOLDER = "evaluations"


def evaluation_stem(protocol: dict[str, Any]) -> str:
    """The file name of a protocol: the same question asked again replaces the old answer."""
    digest = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:8]
    # A stored name of a corpus must not lead into another folder.
    return re.sub(r"[^\w.+=-]", "_", f"{protocol['name']}-{protocol['data']}-{protocol['split']}") + f"-{digest}"


def write_evaluation(folder: Path, record: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> Path:
    """Write a record (with its `protocol`) and its arrays beside it; returns the record's path."""
    stem = folder / FOLDER / evaluation_stem(record["protocol"])
    if arrays is not None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        target, beside = stem.with_name(f"{stem.name}.npz"), stem.with_name(f".{stem.name}.tmp.npz")
        with explained(target), replacing(target, beside):
            np.savez_compressed(beside, **arrays)  # type: ignore[arg-type]
        record = {**record, "arrays": f"{stem.name}.npz"}
    path = stem.with_name(f"{stem.name}.json")
    write_json(path, record)
    return path


def read_evaluations(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """All records of a run (of one protocol), in the order of their names."""
    records = [read_json(path) for path in sorted((folder / FOLDER).glob("*.json"))]
    records = [record for record in records if isinstance(record.get("protocol"), dict)]
    return [record for record in records if name is None or record["protocol"].get("name") == name]


def read_arrays(folder: Path, record: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a record, without unpickling anything; empty when it has none."""
    if "arrays" not in record:
        return {}
    path = folder / FOLDER / Path(record["arrays"]).name
    what_to_do = f"Delete it and {path.with_suffix('.json').name}, and judge the run again."
    try:
        with np.load(path, allow_pickle=False) as arrays:
            size = sum(member.file_size for member in arrays.zip.infolist())
            require_allowed(path, size, allowed_in_memory(path), what_to_do)
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged ({error}). {what_to_do}") from None
