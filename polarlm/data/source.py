"""A corpus before tokenisation: an ordered list of units to read, a fingerprint, and a place to continue from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polarlm.data.config import DataConfig
from polarlm.data.documents import Piece
from polarlm.data.files import file_units


class Unit(Protocol):
    """Something that can be read from its beginning again and again: a file, a split of a hub dataset."""

    name: str
    split: str | None

    def fingerprint(self) -> str: ...
    def size_hint(self) -> int | None: ...
    def pieces(self) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Source:
    """The units of one corpus in reading order."""

    units: Sequence[Unit]
    config: DataConfig

    @property
    def has_own_splits(self) -> bool:
        """Whether every unit belongs to a split and there is something to train and something to judge on."""
        splits = {unit.split for unit in self.units}
        return None not in splits and {"train", "val"} <= splits

    def fingerprint(self) -> str:
        """Changes when a unit's content, name, order or split changes."""
        parts = [[unit.name, unit.split, unit.fingerprint()] for unit in self.units]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, unit: int = 0, piece: int = 0) -> Iterator[tuple[int, int, Piece]]:
        """Pieces from a position on, each with the position after it."""
        for number in range(unit, len(self.units)):
            skip = piece if number == unit else 0
            for index, found in enumerate(self.units[number].pieces()):
                if index >= skip:
                    yield number, index + 1, found


def open_source(config: DataConfig, cache_dir: Path) -> Source:
    """Find the text of a corpus: the embedded one, local files, a download, or a hub dataset."""
    if config.source == "pydocs" and config.path is None:
        from polarlm.data.pydocs import pydocs_file

        return Source(file_units(str(pydocs_file(cache_dir)), config), config)
    if config.path is not None:
        return Source(file_units(config.path, config), config)
    from polarlm.data.locate import locate

    return Source(locate(config, cache_dir), config)
