"""What a corpus yaml may say, checked once, with the nearest valid name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from polarlm.errors import UserError

SPLITS = ("train", "val", "test")
RULES = ("auto", "own", "hash", "position")
PACKINGS = ("stream", "aligned", "best_fit")


@dataclass(frozen=True)
class SplitConfig:
    """How documents are divided: the corpus's own files, a hash of each document, or the position in the text."""

    rule: str = "auto"
    val: float = 0.05
    test: float = 0.0


@dataclass(frozen=True)
class HubConfig:
    """A Hugging Face dataset: repository, configuration, pinned revision, and which of its splits are ours."""

    name: str = ""
    config: str | None = None
    revision: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train"})
    fetch: str = "download"


@dataclass(frozen=True)
class DataConfig:
    """One corpus: where its text is, what a document is, how it is split and stored."""

    name: str = "text"
    source: str = "files"
    path: str | None = None
    local: str | None = None
    url: str | None = None
    sha256: str | None = None
    hub: HubConfig | None = None
    column: str = "text"
    document_separator: str | None = None
    document_start: str | None = None
    split: SplitConfig = field(default_factory=SplitConfig)
    append_eos: bool = True
    newlines: str = "lf"
    errors: str = "strict"
    max_bytes: int | None = None
    streaming: bool = False
    stream_head_bytes: int = 64_000_000
    parts: Mapping[str, Any] | None = None
    weights: Mapping[str, float] | None = None
    mask_documents: bool = False
    packing: str = "stream"
    eval_tokens: int | None = None
    workers: int | None = None
    note: str | None = None


def _read(cls: type, given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    known = [f.name for f in fields(cls)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.4) or known
            raise UserError(f"{prefix}.{key} is not an option. Did you mean {', '.join(near)}?")
    return dict(given)


def read_config(given: Mapping[str, Any]) -> DataConfig:
    """Check the plain mapping of a data yaml and turn it into a DataConfig."""
    values = _read(DataConfig, given, "data")
    if values.get("hub") is not None:
        values["hub"] = HubConfig(**_read(HubConfig, values["hub"], "data.hub"))
        _one_of("data.hub.fetch", values["hub"].fetch, ("download", "stream"))
    if values.get("split") is not None:
        values["split"] = SplitConfig(**_read(SplitConfig, values["split"], "data.split"))
    config = DataConfig(**{key: value for key, value in values.items() if value is not None})
    _one_of("data.source", config.source, ("pydocs", "files", "hub", "mixture"))
    _one_of("data.split.rule", config.split.rule, RULES)
    _one_of("data.newlines", config.newlines, ("lf", "keep"))
    _one_of("data.errors", config.errors, ("strict", "replace", "ignore"))
    _one_of("data.packing", config.packing, PACKINGS)
    if not (config.split.val >= 0 and config.split.test >= 0 and config.split.val + config.split.test < 1):
        raise UserError(
            f"data.split.val={config.split.val} and data.split.test={config.split.test} must be fractions ≥ 0 "
            "whose sum is below 1, for example 0.05 and 0.05."
        )
    return config


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value!r} is not allowed; choose one of {', '.join(allowed)}.")
