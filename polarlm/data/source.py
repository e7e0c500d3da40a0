"""A corpus before tokenisation: its units in reading order, and which split each piece of text belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from polarlm.data.config import SPLITS, DataConfig, SplitConfig, read_data_config
from polarlm.data.probes import VERSION, ProbeTask, describe_probe
from polarlm.data.readers import Piece, Unit, file_units, find_files
from polarlm.errors import UserError


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
        examples = [
            Unit(f"{config.source}:{split}", split, partial(_examples, config.probe, split)) for split in SPLITS
        ]
        identity = [VERSION, describe_probe(config.source, config.probe)]
        return Source(config, lambda: examples, lambda: _digest(identity))
    if config.source == "pydocs":
        from polarlm.data.hub import pydocs_file

        return _of_files(config, str(pydocs_file(cache_dir)))
    from polarlm.data.hub import download, usable_local_copy

    if copy := usable_local_copy(config):
        return _of_files(config, str(copy))
    if config.hub is not None:
        from polarlm.data.hub import hub_identity, hub_units

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


def _examples(probe: ProbeTask, split: str) -> Iterator[Piece]:
    yield from map(Piece, probe.texts(split))


def _of_files(config: DataConfig, path: str) -> Source:
    units = file_units(path, config)
    return Source(config, lambda: units, lambda: _digest([[u.name, u.split, u.fingerprint()] for u in units]))


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_FEW = 1000  # with fewer documents the hash thresholds are set by rank, so that no split is empty by chance
_TOO_FEW_FOR_HASH = 10


@dataclass(frozen=True)
class SplitPlan:
    """The decided rule with its numbers: hash thresholds (test below first, val below second) or byte positions."""

    rule: str
    low: int = 0
    high: int = 0


def document_key(text: str) -> int:
    """64-bit hash of a document's beginning without white space, so that duplicates always share a split."""
    # 8,192 bytes tell documents apart; a longer common beginning only makes two documents share a split.
    beginning = text[:16384].encode().translate(None, b" \t\n\r\x0b\x0c")[:8192]
    return int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest(), "little")


def plan_splits(source: Source, config: SplitConfig) -> SplitPlan:
    """Decide the rule and its thresholds; reads as much of the corpus as that needs."""
    rule = config.rule
    named = {unit.split for unit in source.units}
    claimed = rule == "own" or (rule == "auto" and {"train", "test"} <= named and None not in named)
    if claimed and not source.has_own_splits:
        raise UserError(
            f"data.split.rule={rule} found files or splits for {', '.join(sorted(map(str, named)))}, but train and val "
            "are needed. Name files train.* and valid.* (and test.*), or set data.split.rule=hash or position, which "
            "divide all the text anew."
        )
    if rule == "own" or (rule == "auto" and source.has_own_splits):
        return SplitPlan("own")
    if rule in ("auto", "hash"):
        keys = _first_keys(source)
        if rule == "auto" and len(keys) < _TOO_FEW_FOR_HASH:
            rule = "position"
        elif len(keys) < _FEW:
            return _by_rank(sorted(keys), config)
        else:
            return SplitPlan("hash", int(config.test * 2**64), int((config.test + config.val) * 2**64))
    total = sum(len(piece.text.encode()) for piece in SplitReader(source, SplitPlan("own")))
    train_end = int(total * (1 - config.val - config.test))
    return SplitPlan("position", train_end, train_end + int(total * config.val) if config.test else total)


def _first_keys(source: Source) -> set[int]:
    keys: set[int] = set()
    for piece in SplitReader(source, SplitPlan("own")):
        if piece.first and piece.text:
            keys.add(document_key(piece.text))
            if len(keys) >= _FEW:
                break
    return keys


def _by_rank(keys: list[int], config: SplitConfig) -> SplitPlan:
    test = max(1, round(len(keys) * config.test)) if config.test else 0
    val = max(1, round(len(keys) * config.val)) if config.val else 0
    if test + val >= len(keys):
        raise UserError(
            f"data.split.rule=hash needs more documents: {len(keys)} different ones found, {val} for val and {test} "
            "for test leave none to train on. Use data.split.rule=position, which cuts the text itself."
        )
    # A threshold lies on the first key that is no longer below it.
    return SplitPlan("hash", keys[test] if test else 0, keys[test + val])


class SplitReader:
    """Reads pieces with their split from any saved state on; `state` is the place after the last piece given out.

    data.max_bytes limits every split of its own (or all the text, where it is divided here); the last document is cut.
    """

    def __init__(self, source: Source, plan: SplitPlan, state: dict[str, Any] | None = None):
        self.source, self.plan = source, plan
        self.state: dict[str, Any] = dict(state or {"unit": 0, "piece": 0, "bytes": 0, "read": {}, "split": None})
        self.at_piece_end = True  # false between the parts of a piece that was cut at a split's border

    def __iter__(self) -> Iterator[Piece]:
        limit = self.source.config.max_bytes
        for number in range(self.state["unit"], len(self.source.units)):
            named_split = self.source.units[number].split
            skip = self.state["piece"] if number == self.state["unit"] else 0
            group = named_split or "all"
            if limit and self.state["read"].get(group, 0) >= limit:
                continue
            for index, piece in enumerate(self.source.units[number].pieces()):
                if index < skip:
                    continue
                raw = piece.text.encode()
                seen = self.state["read"].get(group, 0) + len(raw)
                if limit and seen >= limit:
                    raw = raw[: _character_boundary(raw, len(raw) - (seen - limit))]
                    piece = replace(piece, text=raw.decode(), last=True)
                given = self._assign(piece, named_split)
                self.at_piece_end = False
                yield from given[:-1]
                self.state = {
                    "unit": number, "piece": index + 1, "bytes": self.state["bytes"] + len(raw),
                    "read": {**self.state["read"], group: min(seen, limit or seen)}, "split": given[-1].split,
                }  # fmt: skip
                self.at_piece_end = True
                yield given[-1]
                if limit and seen >= limit:
                    break

    def _assign(self, piece: Piece, named_split: str | None) -> list[Piece]:
        if self.plan.rule == "own":
            return [replace(piece, split=named_split)]
        if self.plan.rule == "hash":
            if not piece.first:
                return [replace(piece, split=self.state["split"])]
            key = document_key(piece.text)
            return [replace(piece, split="test" if key < self.plan.low else "val" if key < self.plan.high else "train")]
        return self._by_position(piece)

    def _by_position(self, piece: Piece) -> list[Piece]:
        start, text = self.state["bytes"], piece.text
        raw = text.encode()
        bounds = [0, self.plan.low - start, self.plan.high - start, len(raw)]
        parts = []
        for split, a, b in zip(("train", "val", "test"), bounds[:-1], bounds[1:]):
            a, b = (_character_boundary(raw, min(max(p, 0), len(raw))) for p in (a, b))
            if b > a:
                parts.append((split, raw[a:b].decode()))
        if not parts:
            return [replace(piece, split="train")]
        count = len(parts)
        return [
            Piece(text, first=piece.first or i > 0, last=piece.last or i < count - 1, split=split)
            for i, (split, text) in enumerate(parts)
        ]


def _character_boundary(raw: bytes, position: int) -> int:
    # UTF-8 continuation bytes look like 10xxxxxx; a cut never lands inside a character.
    while 0 < position < len(raw) and raw[position] & 0xC0 == 0x80:
        position -= 1
    return position
