"""Several corpora as one: sequences in fixed proportions, each corpus in its own order, a pure function again."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.config import SPLITS, DataConfig, read_data_config
from polarlm.data.corpus import Corpus, build_corpus
from polarlm.data.order.permutation import Permutation, key
from polarlm.data.order.sequences import Sequences
from polarlm.data.store.build import corpus_texts, split_summary, trained_tokenizer
from polarlm.data.tokenizers.config import TokenizerConfig
from polarlm.errors import UserError

_PERIOD = 1 << 12  # in every so many sequences the proportions are exact (to one sequence)


class MixtureSequences:
    """Sequence number → corpus and number within it, a pure function of (seed, number)."""

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float], seed: int):
        self.parts, self.seed = parts, seed
        shares = np.asarray(weights, float) / np.sum(weights) * _PERIOD
        # Largest remainders: whole numbers of sequences that add up to the period.
        self.quotas = np.floor(shares).astype(np.int64)
        for part in np.argsort(-(shares - self.quotas), kind="stable")[: _PERIOD - int(self.quotas.sum())]:
            self.quotas[part] += 1
        self._owner = np.repeat(np.arange(len(parts)), self.quotas)
        self._first = np.cumsum(self.quotas) - self.quotas
        self._period: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # a memo, not a state

    def where(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(part, number within that part's own line) of every sequence number."""
        periods, places = numbers // _PERIOD, numbers % _PERIOD
        slots = np.empty(len(numbers), np.int64)
        for period in dict.fromkeys(periods.tolist()):
            inside = periods == period
            if self._period[0] != period:
                self._period = (period, Permutation(_PERIOD, key(self.seed, period, 2))(np.arange(_PERIOD)))
            slots[inside] = self._period[1][places[inside]]
        owners = self._owner[slots]
        return owners, periods * self.quotas[owners] + slots - self._first[owners]

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence."""
        owners, within = self.where(numbers)
        counts = np.zeros(len(numbers), np.int64)
        for part in dict.fromkeys(owners.tolist()):
            counts[owners == part] = self.parts[part].counted(within[owners == part])
        return counts

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        owners, within = self.where(numbers)
        results: list[tuple[np.ndarray, ...]] = [()] * len(numbers)
        for part in dict.fromkeys(owners.tolist()):
            inside = np.flatnonzero(owners == part)
            part_rows = self.parts[part].rows(within[inside])
            for row, place in enumerate(inside.tolist()):
                results[place] = tuple(array[row] for array in part_rows if array is not None)
        columns = [np.stack(column) for column in zip(*results)]
        return columns[0], columns[1], columns[2] if len(columns) == 3 else None


def build_mixture(config: DataConfig, tokens: TokenizerConfig, cache: Path, section_bytes: int) -> Corpus:
    """Prepare every part with one common tokenizer and join their splits."""
    parts, weights = dict(config.parts or {}), dict(config.weights or {})
    if not parts or set(parts) != set(weights) or any(weight <= 0 for weight in weights.values()):
        raise UserError(
            f"data.weights must give a positive weight to every part: data.parts has {sorted(parts)}, data.weights has "
            f"{weights}. For example data.weights={{{', '.join(f'{name}: 1' for name in sorted(parts))}}}."
        )
    for name, part in parts.items():
        if read_data_config(part).probe is not None:
            raise UserError(f"data.parts.{name} is a task with symbols of its own; it cannot be part of a mixture.")
    common: Mapping[str, Any] = dataclasses.asdict(tokens)
    if tokens.kind in ("bpe", "char", "word"):
        # Learned from all parts in turn, so that none of them decides the vocabulary alone.
        texts = lambda train_only: _in_turn([corpus_texts(part, cache, train_only) for part in parts.values()])  # noqa: E731
        common = {"kind": "file", "path": str(trained_tokenizer(tokens, list(parts.values()), cache, texts))}
    corpora = [build_corpus(part, common, cache, section_bytes=section_bytes) for part in parts.values()]
    first = corpora[0].manifest
    identity = [[corpus.fingerprint for corpus in corpora], list(weights.values())]
    manifest = {
        "name": config.name, "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "dtype": first["dtype"], "tokenizer": {**first["tokenizer"], "kind": tokens.kind},
        "splits": {split: joined for split in SPLITS if (joined := _join(corpora, split))},
        "leakage": {name: corpus.manifest["leakage"] for name, corpus in zip(parts, corpora)},
    }  # fmt: skip
    return Corpus(corpora[0].folder, manifest, [(corpus, weights[name]) for name, corpus in zip(parts, corpora)])


def _join(corpora: Sequence[Corpus], split: str) -> dict[str, Any] | None:
    summaries = [(corpus.folder.resolve(), s) for corpus in corpora if (s := corpus.manifest["splits"].get(split))]
    if not summaries:
        return None
    # Absolute paths: the shards lie in the folders of the parts.
    shards = [
        {**shard, "file": str(folder / shard["file"]), "documents_file": str(folder / shard["documents_file"])}
        for folder, summary in summaries for shard in summary["shards"]
    ]  # fmt: skip
    return split_summary(shards)


def _in_turn(streams: Sequence[Iterator[str]]) -> Iterator[str]:
    for texts in itertools.zip_longest(*streams):
        yield from (text for text in texts if text is not None)
