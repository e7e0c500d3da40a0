"""Corpora of the Hugging Face hub through `datasets`: from the hub, its cache, or a local copy of a repository."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.data.config import DataConfig
from polarlm.data.read.documents import Piece, documents_by_heading, pieces_of
from polarlm.data.read.files import checked_text
from polarlm.errors import UserError
from polarlm.network import reachable


@dataclass(frozen=True)
class HubUnit:
    """One split of a hub dataset as a stream of document pieces."""

    name: str
    split: str | None
    hub_split: str
    config: DataConfig

    shard: tuple[int, int] = (1, 0)  # (number of shards, this one), where a dataset is streamed

    def size_hint(self) -> int | None:
        """Unknown before the rows are read."""
        return None

    def pieces(self) -> Iterator[Piece]:
        """Every document of the split, in the dataset's order."""
        rows = self._rows()
        heading = self.config.document_start
        for text in documents_by_heading(rows, heading) if heading else rows:
            yield from pieces_of([text])

    def _rows(self) -> Iterator[str]:
        column = self.config.column
        dataset = open_dataset(self.config, self.hub_split)
        if self.shard[0] > 1:
            dataset = dataset.shard(*self.shard)
        names = dataset.column_names
        if names is not None and column not in names:
            raise UserError(f"{self.name} has no column {column!r} (it has: {', '.join(names)}); set data.column.")
        number = 0
        for batch in dataset.select_columns([column]).iter(batch_size=256):
            for value in batch[column]:
                yield checked_text(value, f"{self.name} row {number}", self.config)
                number += 1


def hub_units(config: DataConfig) -> list[HubUnit]:
    """The splits of a hub dataset that a corpus uses, file by file where it is streamed."""
    hub = config.hub
    assert hub is not None
    # A dataset with nothing but a train split is divided by data.split.
    has_splits = len(hub.splits) > 1
    units = []
    for ours, theirs in hub.splits.items():
        shards = open_dataset(config, theirs).num_shards if _streamed(config) else 1
        for number in range(shards):
            name = f"{hub.name}:{theirs}" + (f":{number}" if shards > 1 else "")
            units.append(HubUnit(name, ours if has_splits else None, theirs, config, (shards, number)))
    return units


def hub_identity(config: DataConfig) -> str:
    """Identifies the text without asking the hub: the pinned revision, or the files of a local copy."""
    hub = config.hub
    assert hub is not None
    if not hub.name:
        raise UserError("data.hub.name is missing; for example data.hub.name=roneneldan/TinyStories.")
    folder = local_repository(hub.name)
    state: Any = hub.revision
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        state = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = (hub.name if folder is None else "copy", hub.config, sorted(hub.splits.items()), state)
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _streamed(config: DataConfig) -> bool:
    return config.streaming or (config.hub is not None and config.hub.fetch == "stream")


def local_repository(name: str) -> Path | None:
    """A folder holding a copy of the hub repository: a path, or data/raw/<owner>/<name>."""
    from polarlm.data.read.locate import local_copy

    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    copy = local_copy(name)
    return copy if copy is not None and copy.is_dir() else None


def open_dataset(config: DataConfig, split: str) -> Any:
    """The dataset of one split, opened once per process."""
    hub = config.hub
    assert hub is not None
    return _load(hub.name, hub.config, hub.revision, split, _streamed(config), config.name)


@functools.lru_cache(maxsize=16)
def _load(name: str, subset: str | None, revision: str | None, split: str, streaming: bool, corpus: str) -> Any:
    folder = local_repository(name)
    options: dict[str, Any] = {"split": split, "streaming": streaming}
    if folder is None:
        go_offline_without_network()
        options |= {"path": name, "name": subset, "revision": revision}
    elif subset and (folder / subset).is_dir() and not (folder / "README.md").exists():
        options |= {"path": str(folder), "data_dir": subset}
    else:
        options |= {"path": str(folder), "name": subset}
    from datasets import disable_progress_bars, load_dataset

    if not os.isatty(2):
        disable_progress_bars()
    try:
        return load_dataset(**options)
    except Exception as error:  # the hub client has a dozen kinds of failure
        where = folder or f"the hub ({name}, config {subset}, revision {revision})"
        raise UserError(
            f"data={corpus}: split {split!r} cannot be read from {where}: {type(error).__name__}: "
            f"{str(error).splitlines()[0][:200]}. "
            f"Without network, put a copy of the dataset repository (README.md and data files) into data/raw/{name}/ "
            f"or give files with data.path=<folder with train.*, valid.*, test.* as .txt, .jsonl or .parquet>; "
            "data=pydocs needs neither network nor files."
        ) from None


def go_offline_without_network() -> None:
    """Tell the hub client within seconds that there is no network; by itself it tries for about 25 s, every time."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True") or reachable(hub):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets.config
    import huggingface_hub.constants

    # Both have read the variable if they were imported before.
    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True
