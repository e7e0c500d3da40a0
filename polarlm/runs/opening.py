"""The first files of a run folder: what identifies the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polarlm.data import Corpus
from polarlm.runs.environment import environment
from polarlm.runs.files import write_json, write_text


def open_folder(folder: Path, config: dict[str, Any], corpus: Corpus, parameters: int, *, again: bool) -> None:
    """Write what identifies the run; a continued run keeps what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not again:
        corpus.tokenizer.save(folder / "tokenizer")
        write_json(folder / "corpus.json", corpus.describe())
    write_json(folder / "environment.json", environment())
    parts = {
        "name": folder.name,
        "block": config["choices"]["block"],
        "group": config["group"],
        "seed": config["seed"],
    }
    write_json(folder / "summary.json", {**parts, "parameters": parameters, "status": "running"})
    if not again:
        # Last: config.yaml is what makes the folder a run folder.
        write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
