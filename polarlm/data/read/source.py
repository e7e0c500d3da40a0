"""A corpus before tokenisation: an ordered list of units to read, a fingerprint, and a place to continue from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from polarlm.data.config import SPLITS, DataConfig, read_data_config
from polarlm.data.probes import VERSION, describe_probe
from polarlm.data.read.documents import Piece
from polarlm.data.read.files import file_units, find_files
from polarlm.errors import UserError


class Unit(Protocol):
    """Something that can be read from its beginning again and again: a file, a split of a hub dataset."""

    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str | None: ...

    def size_hint(self) -> int | None: ...
    def pieces(self) -> Iterator[Piece]: ...


class Source:
    """The units of one corpus in reading order, found when they are first needed (a hub has to be asked)."""

    def __init__(self, config: DataConfig, find: Callable[[], Sequence[Unit]], identify: Callable[[], str]):
        self.config, self._find, self._identify = config, find, identify

    @cached_property
    def units(self) -> Sequence[Unit]:
        """Files or hub splits."""
        return self._find()

    @property
    def has_own_splits(self) -> bool:
        """Whether every unit belongs to a split and there is something to train and something to judge on."""
        splits = {unit.split for unit in self.units}
        return None not in splits and {"train", "val"} <= splits

    def fingerprint(self) -> str:
        """Changes when a unit's content, name, order or split changes."""
        return self._identify()


def open_source(config: DataConfig, cache_dir: Path) -> Source:
    """Find the text of a corpus: local files, the embedded one, a local copy, a download, or a hub dataset."""
    if config.path is not None:
        return _of_files(config, config.path)
    if config.probe is not None:
        identity = [VERSION, describe_probe(config.source, config.probe)]
        return Source(config, lambda: [ProbeUnit(split, config) for split in SPLITS], lambda: _digest(identity))
    if config.source == "pydocs":
        from polarlm.data.read.pydocs import pydocs_file

        return _of_files(config, str(pydocs_file(cache_dir)))
    from polarlm.data.read.locate import download, usable_local_copy

    if copy := usable_local_copy(config):
        return _of_files(config, str(copy))
    if config.hub is not None:
        from polarlm.data.read.hub import hub_identity, hub_units

        hub = hub_identity(config)
        return Source(config, lambda: hub_units(config), lambda: hub)
    if config.url:
        return _of_files(config, str(download(config, cache_dir)))
    raise _no_text(config)


def require_text(data: Mapping[str, Any]) -> None:
    """Refuse a corpus that names no text, or a path where none is: known from its settings, before anything heavy."""
    config = read_data_config(data)
    if config.path is not None:
        find_files(config.path)
    elif config.source == "files" and not (config.local or config.url or config.hub):
        raise _no_text(config)


def _no_text(config: DataConfig) -> UserError:
    wanted = f" (looked for {config.local} in data/raw and $POLARLM_SHARED_DATA)" if config.local else ""
    return UserError(
        f"data={config.name} has no text{wanted}: give a file, a folder or a glob with data.path. Without files of "
        "your own, data=pydocs works everywhere."
    )


@dataclass(frozen=True)
class ProbeUnit:
    """One split of a task's examples, each a document."""

    split: str
    config: DataConfig

    @property
    def name(self) -> str:
        return f"{self.config.source}:{self.split}"

    def size_hint(self) -> int | None:
        """Unknown before the examples are made."""
        return None

    def pieces(self) -> Iterator[Piece]:
        """Every example, in order."""
        assert self.config.probe is not None
        yield from map(Piece, self.config.probe.texts(self.split))


def _of_files(config: DataConfig, path: str) -> Source:
    units = file_units(path, config)
    return Source(config, lambda: units, lambda: _digest([[u.name, u.split, u.fingerprint()] for u in units]))


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
