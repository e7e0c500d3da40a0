"""What a corpus yaml may say: names, types, ranges and defaults of every key below `data.`, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polarlm.data.probes import PROBES, Induction, Permutations, ProbeTask, Recall, SelectiveCopying
from polarlm.errors import UserError
from polarlm.settings import read_settings, setting

SPLITS = ("train", "val", "test")
PACKINGS = ("stream", "aligned", "best_fit")
# Part of file names in the cache: a name must not lead out of it.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class SplitConfig:
    """How documents are divided: the corpus's own files, a hash of each document, or the position in the text."""

    rule: str = setting("auto", choices=("auto", "own", "hash", "position"))
    val: float = setting(0.05, above=0, below=1)
    test: float = setting(0.0, at_least=0, below=1)


@dataclass(frozen=True)
class HubConfig:
    """A Hugging Face dataset: repository, configuration, pinned revision, and which of its splits are ours."""

    name: str = setting("", pattern=r"(?!(.*/)?\.{1,2}(/|$)).*", like="a dataset of the hub, like owner/name")
    config: str | None = None
    revision: str | None = None
    splits: Mapping[str, str | None] = setting(lambda: {"train": "train"})
    fetch: str = setting("download", choices=("download", "stream"))

    @property
    def named_splits(self) -> dict[str, str]:
        """Our name → theirs, of the splits that are used."""
        return {ours: theirs for ours, theirs in self.splits.items() if theirs}


@dataclass(frozen=True)
class DataConfig:
    """One corpus: where its text is, what a document is, how it is split and stored."""

    name: str = "text"
    source: str = setting("files", choices=("pydocs", "files", "hub", "mixture", *PROBES))
    path: str | None = None
    local: str | None = None
    url: str | None = None
    sha256: str | None = None
    hub: HubConfig | None = None
    mqar: Recall | None = None
    permutations: Permutations | None = None
    copying: SelectiveCopying | None = None
    induction: Induction | None = None
    column: str = "text"
    document_separator: str | None = None
    document_start: str | None = None
    split: SplitConfig = field(default_factory=SplitConfig)
    append_eos: bool = True
    newlines: str = setting("lf", choices=("lf", "keep"))
    errors: str = setting("strict", choices=("strict", "replace", "ignore"))
    max_bytes: int | None = setting(None, at_least=1)
    streaming: bool = False
    stream_head_bytes: int = setting(64_000_000, at_least=1)
    parts: Mapping[str, Any] | None = None
    weights: Mapping[str, float] | None = setting(None, above=0)
    mask_documents: bool = False
    packing: str = setting("stream", choices=PACKINGS)
    eval_tokens: int | None = setting(None, at_least=2)
    workers: int | None = setting(None, at_least=1, at_most=1024)

    @property
    def probe(self) -> ProbeTask | None:
        """The task whose examples are the text, where it is one (see data/probes.py)."""
        if self.source not in PROBES or self.path is not None:
            return None
        return getattr(self, self.source) or PROBES[self.source]()


def read_data_config(given: Mapping[str, Any]) -> DataConfig:
    """Check the plain mapping of a data yaml and turn it into a DataConfig."""
    config = read_settings(DataConfig, given, "data")
    if not _NAME.fullmatch(config.name):
        raise UserError(
            f"data.name={config.name!r} must be a plain name of letters, digits, _, - and . (it becomes part of file "
            "names in the cache)."
        )
    if config.url is not None and not config.url.startswith(("https://", "http://")):
        raise UserError(f"data.url={config.url!r} must begin with https:// or http://; give a local file as data.path.")
    if config.split.val + config.split.test >= 1:
        raise UserError(
            f"data.split.val={config.split.val} and data.split.test={config.split.test} leave nothing to train on: "
            "their sum must be below 1, for example 0.05 and 0.05."
        )
    if config.probe is not None and (config.streaming or config.packing != "stream" or config.max_bytes):
        raise UserError(
            f"data={config.name} is made of examples of one length: data.streaming, data.packing and data.max_bytes do "
            f"not apply to it; set data.{config.source}.examples instead."
        )
    if config.source == "mixture":
        require_parts(dict(config.parts or {}), dict(config.weights or {}))
    if config.document_start is not None:
        try:
            re.compile(config.document_start)
        except re.error as error:
            raise UserError(
                f"data.document_start={config.document_start!r} is not a regular expression: {error}."
            ) from None
    if config.document_separator == "":
        raise UserError("data.document_separator is empty; give the text between documents, or null for none.")
    return config


def require_parts(parts: dict[str, Any], weights: dict[str, float]) -> None:
    """Refuse a mixture without parts, or with parts that have no weight or are no text."""
    if not parts:
        raise UserError(
            "A mixture needs parts: data=mixture +data@data.parts.code=pydocs +data@data.parts.plays=shakespeare "
            "data.weights={code:0.7,plays:0.3}, or choose another data=…"
        )
    if set(parts) != set(weights):
        raise UserError(
            f"data.weights must give a positive weight to every part: data.parts has {sorted(parts)}, data.weights has "
            f"{weights}. For example data.weights={{{', '.join(f'{name}: 1' for name in sorted(parts))}}}."
        )
    for name, part in parts.items():
        if read_data_config(part).probe is not None:
            raise UserError(f"data.parts.{name} is a task with symbols of its own; it cannot be part of a mixture.")
