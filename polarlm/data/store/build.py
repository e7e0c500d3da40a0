"""Preparing a corpus: split plan, tokenizer, sections, report, and the rename that makes it a corpus."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polarlm.data.atomic import explained, json_or_none, locked, write_sorted_json
from polarlm.data.config import SPLITS, DataConfig, read_data_config
from polarlm.data.probes import describe_probe
from polarlm.data.read.source import Source, open_source
from polarlm.data.read.splits import SplitPlan, SplitReader, plan_splits
from polarlm.data.store.leakage import leakage_report
from polarlm.data.store.progress import PrepareProgress
from polarlm.data.store.sections import build_sections
from polarlm.data.tokenizers.config import TokenizerConfig, make_tokenizer
from polarlm.data.tokenizers.tokenizer import Tokenizer, WordTokenizer, load_tokenizer
from polarlm.errors import UserError

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
    path = partial / "plan.json"
    if not isinstance(json_or_none(path), dict):
        write_sorted_json(path, asdict(plan_splits(source, config.split)))
    return SplitPlan(**json.loads(path.read_text()))


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
