"""From a corpus's configuration to its prepared tokens: find the text, split it, tokenise it once, open it for ever."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from polarlm.data.atomic import write_json
from polarlm.data.build import SECTION_BYTES, build_sections, shard_damage
from polarlm.data.config import SPLITS, DataConfig, read_config
from polarlm.data.leakage import leakage_report
from polarlm.data.progress import PrepareProgress
from polarlm.data.source import Source, open_source
from polarlm.data.splits import SplitPlan, SplitReader, plan_splits
from polarlm.data.store import TokenStore
from polarlm.data.tokenizer import Tokenizer, load_tokenizer
from polarlm.data.tokenizer_config import TokenizerConfig, make_tokenizer, read_tokenizer_config
from polarlm.errors import UserError

FORMAT = 2  # raise it when the meaning of stored files changes: older stores are then built anew
# Stores up to this size are checked by checksum at every opening; larger ones when a file's size or time has changed.
_ALWAYS_VERIFY = 64 << 20
_MANIFEST = "manifest.json"


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

    @property
    def splits(self) -> list[str]:
        """Names of the splits that have tokens."""
        return [split for split in SPLITS if split in self.manifest["splits"]]

    @property
    def fingerprint(self) -> str:
        """Identifies source, tokenizer and options."""
        return self.manifest["fingerprint"]

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
        described["splits"] = {}
        for split in self.splits:
            store = self.store(split)
            described["splits"][split] = {
                "documents": store.documents, "tokens": len(store), "bytes": store.bytes,
                "bytes_per_token": store.bytes_per_token, "unknown": store.summary["unknown"],
            }  # fmt: skip
        return described


def build_corpus(
    data: Mapping[str, Any], tokenizer: Mapping[str, Any], cache_dir: str | Path = "data/cache", *,
    section_bytes: int = SECTION_BYTES,
) -> Corpus:  # fmt: skip
    """Open the prepared corpus for these settings, preparing it first if that was not done or was interrupted."""
    config, tokens = read_config(data), read_tokenizer_config(tokenizer)
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    if config.source == "mixture":
        from polarlm.data.mixture import build_mixture

        return build_mixture(config, tokens, cache, section_bytes)
    prepared, source, fingerprint, folder = _place(config, tokens, cache, section_bytes)
    with _lock(folder):
        corpus = _open(folder)
        if corpus is None:
            corpus = _prepare(folder, prepared, tokens, source, fingerprint, section_bytes)
    if config.streaming:
        plan = SplitPlan(**json.loads((corpus.folder / "plan.json").read_text()))
        corpus.stream = (open_source(config, cache), plan)
    return corpus


def prepared_corpus(
    data: Mapping[str, Any], tokenizer: Mapping[str, Any], cache_dir: str | Path = "data/cache", *,
    section_bytes: int = SECTION_BYTES,
) -> Corpus | None:  # fmt: skip
    """The prepared corpus as it lies there, neither checked nor repaired; None if it has not been prepared."""
    config, tokens = read_config(data), read_tokenizer_config(tokenizer)
    if config.source == "mixture":
        return build_corpus(data, tokenizer, cache_dir, section_bytes=section_bytes)
    *_, folder = _place(config, tokens, Path(cache_dir), section_bytes)
    return Corpus(folder, json.loads((folder / _MANIFEST).read_text())) if (folder / _MANIFEST).exists() else None


def _place(
    config: DataConfig, tokens: TokenizerConfig, cache: Path, section_bytes: int
) -> tuple[DataConfig, Source, str, Path]:
    # What is streamed is prepared only at its head: tokenizer, val and test.
    head = min(config.max_bytes or config.stream_head_bytes, config.stream_head_bytes)
    prepared = replace(config, max_bytes=head) if config.streaming else config
    source = open_source(prepared, cache)
    fingerprint = corpus_fingerprint(prepared, tokens, source, section_bytes)
    return prepared, source, fingerprint, cache / f"{config.name}-{tokens.kind}-{fingerprint[:12]}"


def corpus_fingerprint(config: DataConfig, tokens: TokenizerConfig, source: Source, section_bytes: int) -> str:
    """Hash of everything that decides which ids are stored where."""
    parts = {
        "format": FORMAT, "source": source.fingerprint(), "section_bytes": section_bytes, "split": asdict(config.split),
        "tokenizer": tokens.identity(), "column": config.column, "separator": config.document_separator,
        "start": config.document_start, "eos": config.append_eos, "newlines": config.newlines, "errors": config.errors,
        "max_bytes": config.max_bytes, "name": config.name,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _lock(folder: Path) -> FileLock:
    # The operating system frees the lock of a killed process by itself.
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=1)
        lock.release()
    except Timeout:
        print(f"{folder.name} is being prepared by another process; waiting for it.", file=sys.stderr, flush=True)
    return lock


def _open(folder: Path) -> Corpus | None:
    """The corpus in a finished folder; a damaged one is turned back into a partial build and None is returned."""
    manifest = folder / _MANIFEST
    if not manifest.exists():
        return None
    corpus = Corpus(folder, json.loads(manifest.read_text()))
    damaged = find_damage(corpus)
    if not damaged:
        return corpus
    print(f"{folder}: {'; '.join(damaged.values())}. Rebuilding the damaged sections.", file=sys.stderr)
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    for file in damaged:
        (partial / f"section-{file.split('-')[1][:5]}.json").unlink(missing_ok=True)
    return None


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
    if not thorough and not small and seal.exists() and json.loads(seal.read_text()) == stats:
        return {}
    damage = {shard["file"]: what for shard in shards if (what := shard_damage(corpus.folder, shard))}
    if not damage and not small:
        write_json(seal, stats)
    return damage


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _prepare(
    folder: Path, config: DataConfig, tokens: TokenizerConfig, source: Source, fingerprint: str, section_bytes: int
) -> Corpus:
    partial = _partial(folder)
    partial.mkdir(parents=True, exist_ok=True)
    plan = _plan(partial, source, config)
    tokenizer = _tokenizer(partial, tokens, source, plan)
    before = json.loads((partial / _MANIFEST).read_text()) if (partial / _MANIFEST).exists() else None
    with PrepareProgress(config.name, _expected_bytes(source)) as progress:
        sections = build_sections(partial, source, plan, tokenizer, progress, config.workers, section_bytes)
    splits = _summaries(sections)
    _check_not_empty(splits, config, source)
    # A repaired store keeps its report: the hashes behind it were removed when it was first finished.
    leakage = before["leakage"] if before else leakage_report(partial, len(sections))
    manifest = {
        "format": FORMAT, "name": config.name, "fingerprint": fingerprint, "dtype": tokenizer.dtype.str,
        "tokenizer": {"kind": tokens.kind, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint},
        "splits": splits, "split_rule": plan.rule, "leakage": leakage, "sections": len(sections),
        "empty_documents": sum(section["empty_documents"] for section in sections),
        "units": [unit.name for unit in source.units][:1000],
    }  # fmt: skip
    write_json(partial / _MANIFEST, manifest)
    _sweep(partial, sections)
    os.rename(partial, folder)
    return Corpus(folder, json.loads((folder / _MANIFEST).read_text()))


def _plan(partial: Path, source: Source, config: DataConfig) -> SplitPlan:
    path = partial / "plan.json"
    if not path.exists():
        write_json(path, asdict(plan_splits(source, config.split)))
    return SplitPlan(**json.loads(path.read_text()))


def _tokenizer(partial: Path, tokens: TokenizerConfig, source: Source, plan: SplitPlan) -> Tokenizer:
    folder = partial / "tokenizer"
    if not folder.exists():
        beside = partial / "tokenizer.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        make_tokenizer(tokens, lambda train_only: _texts(source, plan, train_only)).save(beside)
        os.rename(beside, folder)
    return load_tokenizer(folder)


def corpus_texts(data: Mapping[str, Any], cache: Path, train_only: bool) -> Iterator[str]:
    """The texts of an unprepared corpus, for a tokenizer that learns from several."""
    config = read_config(data)
    source = open_source(config, cache)
    return _texts(source, plan_splits(source, config.split), train_only)


def trained_tokenizer(
    tokens: TokenizerConfig, parts: list[Mapping[str, Any]], cache: Path, texts: Callable[[bool], Iterator[str]]
) -> Path:
    """The folder of a tokenizer learned from several corpora; learned if missing."""
    configs = [read_config(part) for part in parts]
    prints = [corpus_fingerprint(config, tokens, open_source(config, cache), 0) for config in configs]
    folder = cache / f"tokenizer-{tokens.kind}-{hashlib.sha256(''.join(prints).encode()).hexdigest()[:12]}"
    with _lock(folder):
        if not folder.exists():
            beside = _partial(folder)
            shutil.rmtree(beside, ignore_errors=True)
            make_tokenizer(tokens, texts).save(beside)
            os.rename(beside, folder)
    return folder


def _texts(source: Source, plan: SplitPlan, train_only: bool) -> Iterator[str]:
    for piece in SplitReader(source, plan):
        if piece.split == "train" or not train_only:
            yield piece.text


def _expected_bytes(source: Source) -> int | None:
    hints = [unit.size_hint() for unit in source.units]
    sizes = [hint for hint in hints if hint is not None]
    total = sum(sizes) if len(sizes) == len(hints) else None
    limit = source.config.max_bytes
    return min(total, limit) if total is not None and limit else limit or total


def _summaries(sections: list[dict[str, Any]]) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = [section["splits"][split] for section in sections if split in section["splits"]]
        if sum(shard["tokens"] for shard in shards):
            totals = {
                what: sum(shard[what] for shard in shards) for what in ("tokens", "documents", "bytes", "unknown")
            }
            splits[split] = {**totals, "shards": shards}
    return splits


def _check_not_empty(splits: dict[str, Any], config: DataConfig, source: Source) -> None:
    where = ", ".join(str(unit.name) for unit in source.units[:3]) + (" …" if len(source.units) > 3 else "")
    if not splits:
        raise UserError(f"There is no text in {config.path or config.name} ({where}): every document is empty.")
    for split in ("train", "val"):
        if split not in splits and not (split == "val" and config.split.val == 0):
            raise UserError(
                f"The {split} split of {config.path or config.name} ({where}) is empty; the corpus is too small for "
                f"data.split.val={config.split.val} and data.split.test={config.split.test}. Change these or add text."
            )


def _sweep(partial: Path, sections: list[dict[str, Any]]) -> None:
    """Remove what only the build needed, and what an interrupted build left behind."""
    shards = [shard for section in sections for shard in section["splits"].values()]
    kept = {name for shard in shards for name in (shard["file"], shard["documents_file"])}
    for file in partial.iterdir():
        stored = file.suffix in (".bin", ".docs") and file.name in kept
        if file.is_file() and file.suffix != ".json" and not stored:
            file.unlink()
