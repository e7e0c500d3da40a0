"""From a corpus's configuration to its prepared tokens: find the text, split it, tokenise it once, open it for ever."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polarlm.data.atomic import explained, json_or_none, locked, write_sorted_json
from polarlm.data.config import SPLITS, DataConfig, read_data_config
from polarlm.data.probes import ProbeTask, restore_probe
from polarlm.data.read.source import Source, open_source
from polarlm.data.read.splits import SplitPlan
from polarlm.data.store.build import MANIFEST, build_store, corpus_fingerprint, partial_folder, read_manifest
from polarlm.data.store.sections import SECTION_BYTES, shard_damage
from polarlm.data.store.tokens import TokenStore
from polarlm.data.tokenizers.config import TokenizerConfig, read_tokenizer_config
from polarlm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from polarlm.errors import UserError

# Stores up to this size are checked by checksum at every opening; larger ones when a file's size or time has changed.
_ALWAYS_VERIFY = 64 << 20


@dataclass
class Corpus:
    """A prepared corpus: its tokenizer, one token store per split, and what is known about them."""

    folder: Path
    manifest: dict[str, Any]
    parts: list[tuple[Corpus, float]] = field(default_factory=list)  # of a mixture, with their weights
    stream: tuple[Source, SplitPlan] | None = None  # where training reads instead of the store, if data.streaming

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the stored ids belong to."""
        return load_tokenizer(self.folder / "tokenizer")

    @cached_property
    def probe(self) -> ProbeTask | None:
        """The task whose examples these are, where it is one: its answers are the targets, not the next tokens."""
        return restore_probe(self.manifest["probe"]) if "probe" in self.manifest else None

    def tokenizer_intact(self) -> bool:
        """Whether the stored tokenizer can be read and is the one that the tokens were made with."""
        try:
            return self.tokenizer.fingerprint == self.manifest["tokenizer"]["fingerprint"]
        except UserError:
            return False

    @property
    def splits(self) -> list[str]:
        """Names of the splits that have tokens."""
        return [split for split in SPLITS if split in self.manifest["splits"]]

    @property
    def fingerprint(self) -> str:
        """Identifies source, tokenizer and options: under which name a corpus lies in the cache."""
        return self.manifest["fingerprint"]

    @property
    def content(self) -> str:
        """Equal for two corpora whose tokens and tokenizer are equal, whatever their files were called or when made.

        What a resumed run and two compared runs must have in common: `data=pydocs` has another content under another
        Python, a replaced file another one under the same name.
        """
        parts: list[Any] = [[part.content, weight] for part, weight in self.parts]
        if not parts:
            parts = [[split, self.store(split).fingerprint] for split in self.splits]
        if self.stream is not None:  # only its head is stored; the rest is known by its source
            parts.append(self.fingerprint)
        parts += [self.manifest["tokenizer"]["fingerprint"], self.manifest.get("probe")]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The corpus's name in its yaml."""
        return self.manifest["name"]

    def store(self, split: str) -> TokenStore:
        """The token store of a split."""
        if split not in self.manifest["splits"]:
            raise UserError(f"Corpus {self.name} has no split {split!r}; it has {', '.join(self.splits)}.")
        return TokenStore(self.folder, split, self.manifest["splits"][split], self.manifest["dtype"])

    def describe(self) -> dict[str, Any]:
        """Plain numbers for people and run folders."""
        described: dict[str, Any] = {key: self.manifest[key] for key in ("name", "fingerprint", "tokenizer", "leakage")}
        described |= {"content": self.content, "splits": {}}
        for split in self.splits:
            store = self.store(split)
            described["splits"][split] = {
                "documents": store.documents, "tokens": len(store), "bytes": store.bytes,
                "bytes_per_token": store.bytes_per_token, "unknown": store.summary["unknown"],
                "content": store.fingerprint,
            }  # fmt: skip
        return described


def build_corpus(
    data: Mapping[str, Any], tokenizer: Mapping[str, Any], cache_dir: str | Path = "data/cache", *,
    section_bytes: int = SECTION_BYTES,
) -> Corpus:  # fmt: skip
    """Open the prepared corpus for these settings, preparing it first if that was not done or was interrupted."""
    config, tokens = read_data_config(data), read_tokenizer_config(tokenizer)
    if config.probe is not None and tokens.kind != "word":
        raise UserError(f"data={config.name} consists of symbols: it needs tokenizer=word, not kind {tokens.kind}.")
    cache = Path(cache_dir)
    with explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if config.source == "mixture":
        from polarlm.data.order.mixture import build_mixture

        return build_mixture(config, tokens, cache, section_bytes)
    prepared, source, fingerprint, folder = _place(config, tokens, cache, section_bytes)
    corpus = _opened(folder)  # without the lock: a prepared cache may be read-only
    if corpus is None:
        with locked(folder):
            corpus = _opened(folder)
            if corpus is None:
                _make_room(folder)
                build_store(folder, prepared, tokens, source, fingerprint, section_bytes)
                corpus = Corpus(folder, json.loads((folder / MANIFEST).read_text()))
    if config.streaming:
        plan = SplitPlan(**json.loads((corpus.folder / "plan.json").read_text()))
        corpus.stream = (open_source(config, cache), plan)
    return corpus


def prepared_corpus(data: Mapping[str, Any], tokenizer: Mapping[str, Any], cache_dir: str | Path) -> Corpus | None:
    """The prepared corpus as it lies there, neither checked nor repaired; None if it has not been prepared."""
    config, tokens = read_data_config(data), read_tokenizer_config(tokenizer)
    if config.source == "mixture":
        return build_corpus(data, tokenizer, cache_dir)
    *_, folder = _place(config, tokens, Path(cache_dir), SECTION_BYTES)
    manifest = read_manifest(folder)
    return None if manifest is None else Corpus(folder, manifest)


def _place(
    config: DataConfig, tokens: TokenizerConfig, cache: Path, section_bytes: int
) -> tuple[DataConfig, Source, str, Path]:
    # What is streamed is prepared only at its head: tokenizer, val and test.
    head = min(config.max_bytes or config.stream_head_bytes, config.stream_head_bytes)
    prepared = replace(config, max_bytes=head) if config.streaming else config
    source = open_source(prepared, cache)
    fingerprint = corpus_fingerprint(prepared, tokens, source, section_bytes)
    return prepared, source, fingerprint, cache / f"{config.name}-{tokens.kind}-{fingerprint[:12]}"


def _opened(folder: Path) -> Corpus | None:
    """The corpus in a finished folder, if it is there and whole."""
    manifest = read_manifest(folder)
    corpus = None if manifest is None else Corpus(folder, manifest)
    return corpus if corpus is not None and corpus.tokenizer_intact() and not find_damage(corpus) else None


def _make_room(folder: Path) -> None:
    """Turn a damaged corpus back into a partial build, without what is damaged."""
    if not folder.exists():
        return
    manifest = read_manifest(folder)
    if manifest is None or not Corpus(folder, manifest).tokenizer_intact():
        print(f"{folder}: the manifest or the tokenizer is damaged. Building the corpus anew.", file=sys.stderr)
        shutil.rmtree(folder)
        return
    damaged = find_damage(Corpus(folder, manifest))
    print(f"{folder}: {'; '.join(damaged.values())}. Rebuilding the damaged sections.", file=sys.stderr)
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    for file in damaged:
        (partial / f"section-{file.split('-')[1][:5]}.json").unlink(missing_ok=True)


def find_damage(corpus: Corpus, thorough: bool = False) -> dict[str, str]:
    """{shard file: what is wrong with it}; without `thorough`, large stores with unchanged files are trusted."""
    shards = [shard for split in corpus.manifest["splits"].values() for shard in split["shards"]]
    names = [name for shard in shards for name in (shard["file"], shard["documents_file"])]
    stats = {}
    for name in names:
        path = corpus.folder / name
        stats[name] = [path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else None
    seal = corpus.folder / "verified.json"
    small = sum(stat[0] for stat in stats.values() if stat) <= _ALWAYS_VERIFY
    if not thorough and not small and json_or_none(seal) == stats:
        return {}
    damage = {shard["file"]: what for shard in shards if (what := shard_damage(corpus.folder, shard))}
    if not damage and not small:
        with contextlib.suppress(UserError):  # a read-only cache is checked at every opening
            write_sorted_json(seal, stats)
    return damage
