"""From a corpus's configuration to its prepared tokens: find the text, split it, tokenise it once, cache it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polarlm.data.atomic import explained, json_or_none, locked, write_sorted_json
from polarlm.data.config import SPLITS, DataConfig, read_data_config
from polarlm.data.order import require_length
from polarlm.data.probes import ProbeTask, describe_probe, restore_probe
from polarlm.data.readers import find_files
from polarlm.data.source import Source, SplitPlan, SplitReader, open_source, plan_splits
from polarlm.data.store import SECTION_BYTES, PrepareProgress, TokenStore, build_sections, leakage_report, shard_damage
from polarlm.data.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    WordTokenizer,
    load_tokenizer,
    make_tokenizer,
    read_tokenizer_config,
)
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
        plan = _stored_plan(corpus.folder) or plan_splits(source, prepared.split)
        corpus.stream = (open_source(config, cache), plan)
    return corpus


def corpus_in_cache(cache_dir: str | Path, fingerprint: str) -> Corpus | None:
    """The prepared corpus of this fingerprint, opened without a look at its text; None where it is not in the cache."""
    if not re.fullmatch(r"[0-9a-f]{64}", fingerprint):
        return None
    folders = Path(cache_dir).glob(f"*-{fingerprint[:12]}")
    opened = (_opened(folder) for folder in folders)
    return next((corpus for corpus in opened if corpus is not None and corpus.fingerprint == fingerprint), None)


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


FORMAT = 2  # raise it when the meaning of stored files changes: older stores are then built anew
MANIFEST = "manifest.json"


def corpus_fingerprint(config: DataConfig, tokens: TokenizerConfig, source: Source, section_bytes: int) -> str:
    """Hash of everything that decides which ids are stored where."""
    parts = {
        "format": FORMAT, "source": source.fingerprint(), "section_bytes": section_bytes, "split": asdict(config.split),
        "tokenizer": tokens.identity(), "column": config.column, "separator": config.document_separator,
        "start": config.document_start, "eos": config.append_eos, "newlines": config.newlines, "errors": config.errors,
        "max_bytes": None, "name": config.name,
    }  # fmt: skip
    if config.max_bytes is not None:
        parts["cut_at"] = config.max_bytes
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def partial_folder(folder: Path) -> Path:
    """Where an unfinished build of `folder` lies."""
    return folder.with_name(folder.name + ".partial")


def build_store(
    folder: Path, config: DataConfig, tokens: TokenizerConfig, source: Source, fingerprint: str, section_bytes: int
) -> None:
    """Build a corpus beside `folder`, or finish building it, and rename it into place."""
    partial = partial_folder(folder)
    with explained(partial):
        partial.mkdir(parents=True, exist_ok=True)
    plan = _plan(partial, source, config)
    tokenizer = _tokenizer(partial, tokens, source, plan)
    before = read_manifest(partial)
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
    if config.probe is not None:
        manifest["probe"] = describe_probe(config.source, config.probe)
    write_sorted_json(partial / MANIFEST, manifest)
    _sweep(partial, sections)
    os.rename(partial, folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a store says of itself; None where it says nothing or nothing that can be relied on."""
    manifest = json_or_none(folder / MANIFEST)
    try:
        if not all(manifest[key] for key in ("name", "fingerprint", "dtype", "tokenizer", "splits")):
            return None
        for summary in manifest["splits"].values():
            for shard in summary["shards"]:
                if not all(isinstance(shard[key], str) for key in ("file", "documents_file", "sha256")):
                    return None
            if sum(shard["tokens"] for shard in summary["shards"]) != summary["tokens"]:
                return None
    except (AttributeError, KeyError, TypeError):
        return None
    return manifest


def _plan(partial: Path, source: Source, config: DataConfig) -> SplitPlan:
    plan = _stored_plan(partial)
    if plan is None:
        plan = plan_splits(source, config.split)
        write_sorted_json(partial / "plan.json", asdict(plan))
    return plan


def _stored_plan(folder: Path) -> SplitPlan | None:
    """The plan that a store was divided by; None where its file is missing or damaged."""
    stored = json_or_none(folder / "plan.json")
    try:
        plan = SplitPlan(**stored)
    except TypeError:
        return None
    known = plan.rule in ("own", "hash", "position") and isinstance(plan.low, int) and isinstance(plan.high, int)
    return plan if known else None


def _tokenizer(partial: Path, tokens: TokenizerConfig, source: Source, plan: SplitPlan) -> Tokenizer:
    folder = partial / "tokenizer"
    if not folder.exists() and source.config.probe is not None:
        _save(WordTokenizer(source.config.probe.words), folder)
    elif not folder.exists():
        _save(make_tokenizer(tokens, lambda train_only: _texts(source, plan, train_only)), folder)
    return load_tokenizer(folder)


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    beside = partial_folder(folder)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        tokenizer.save(beside)
        os.rename(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def corpus_texts(data: Mapping[str, Any], cache: Path, train_only: bool) -> Iterator[str]:
    """The texts of an unprepared corpus, for a tokenizer that learns from several."""
    config = read_data_config(data)
    source = open_source(config, cache)
    return _texts(source, plan_splits(source, config.split), train_only)


def trained_tokenizer(
    tokens: TokenizerConfig, parts: list[Mapping[str, Any]], cache: Path, texts: Callable[[bool], Iterator[str]]
) -> Path:
    """The folder of a tokenizer learned from several corpora; learned if missing."""
    configs = [read_data_config(part) for part in parts]
    prints = [corpus_fingerprint(config, tokens, open_source(config, cache), 0) for config in configs]
    folder = cache / f"tokenizer-{tokens.kind}-{hashlib.sha256(''.join(prints).encode()).hexdigest()[:12]}"
    if not folder.exists():
        with locked(folder):
            if not folder.exists():
                _save(make_tokenizer(tokens, texts), folder)
    return folder


def _texts(source: Source, plan: SplitPlan, train_only: bool) -> Iterator[str]:
    for piece in SplitReader(source, plan):
        if piece.split == "train" or not train_only:
            yield piece.text


def _expected_bytes(source: Source) -> int | None:
    sizes = [unit.size for unit in source.units if unit.size is not None]
    total = sum(sizes) if len(sizes) == len(source.units) else None
    limit = source.config.max_bytes
    return min(total, limit) if total is not None and limit else limit or total


def _summaries(sections: list[dict[str, Any]]) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = [section["splits"][split] for section in sections if split in section["splits"]]
        if sum(shard["tokens"] for shard in shards):
            splits[split] = split_summary(shards)
    return splits


def split_summary(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """What the shards of a split hold together."""
    totals = {what: sum(shard[what] for shard in shards) for what in ("tokens", "documents", "bytes", "unknown")}
    return {**totals, "shards": shards}


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


def build_mixture(config: DataConfig, tokens: TokenizerConfig, cache: Path, section_bytes: int) -> Corpus:
    """Prepare every part with one common tokenizer and join their splits."""
    parts, weights = dict(config.parts or {}), dict(config.weights or {})
    common: Mapping[str, Any] = asdict(tokens)
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


# -- checks of the user's own text and tokenizer that are cheap enough to make before torch is loaded ------------------


PLAIN = ("", ".txt", ".md", ".json", ".jsonl", ".csv", ".tsv")  # read without a heavy library
IN_DOUBT = 64  # bytes per token of the context; a longer text fills it in any reasonable split


def require_tokenizer(tokenizer: Mapping[str, Any]) -> None:
    """Refuse a tokenizer file that can't be used."""
    config = read_tokenizer_config(tokenizer)
    if config.kind == "file" and config.path is not None:
        make_tokenizer(config, lambda train_only: iter(()))


def require_enough_text(data: Mapping[str, Any], tokenizer: Mapping[str, Any], context: int) -> None:
    """Refuse a short text whose train split has fewer tokens than one context; longer texts are not read here.

    The text is prepared in a temporary folder, so a refused one leaves nothing in the cache.
    """
    config, tokens = read_data_config(data), read_tokenizer_config(tokenizer)
    if config.path is None or config.source == "mixture" or config.streaming or config.packing != "stream":
        return
    files = find_files(config.path)
    small = sum(file.stat().st_size for file in files) <= IN_DOUBT * (context + 1)
    if not small or tokens.kind == "hub" or any(file.suffix not in PLAIN for file in files):
        return
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stderr(io.StringIO()):
        require_length(build_corpus(data, tokenizer, cache).store("train"), context)
