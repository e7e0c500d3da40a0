"""Where the text of a named corpus is: a local copy if there is one, else a download or the Hugging Face hub."""

from __future__ import annotations

import glob
import http.client
import os
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from polarlm.data.atomic import explained, file_sha256, locked
from polarlm.data.config import DataConfig
from polarlm.data.read.files import file_units
from polarlm.errors import UserError
from polarlm.visible import say_once

if TYPE_CHECKING:
    from polarlm.data.tokenizers.config import TokenizerConfig

_OFFLINE_CHOICES = "Offline and without any files data=pydocs works; your own files work with data=text data.path=…"


def raw_folders() -> list[Path]:
    """Folders in which local copies of public corpora are looked for: data/raw, then $POLARLM_SHARED_DATA."""
    named = ["data/raw", os.environ.get("POLARLM_SHARED_DATA")]
    return [Path(name).resolve() for name in named if name and Path(name).is_dir()]


def local_copy(name: str) -> Path | None:
    """A file or folder (or glob with matches) called `name` in one of the raw folders."""
    for folder in raw_folders():
        if glob.glob(str(folder / name)):
            return folder / name
    return None


def usable_local_copy(config: DataConfig) -> Path | None:
    """The local copy of a named corpus, unless it lacks a split: then it is not the corpus its name promises."""
    copy = local_copy(config.local) if config.local else None
    if copy is None:
        return None
    if config.split.rule == "own" and not {"train", "val"} <= {unit.split for unit in file_units(str(copy), config)}:
        return None
    say_once(f"data={config.name}: using the local copy {copy}")
    return copy


def download(config: DataConfig, cache_dir: Path) -> Path:
    """Fetch data.url once, beside and renamed, and compare it with its checksum."""
    assert config.url is not None
    target = cache_dir / "downloads" / f"{config.name}-{Path(urlsplit(config.url).path).name}"
    if _whole(target, config):
        return target
    with explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target):
        if not _whole(target, config):
            _fetch(config, target)
    return target


def _whole(target: Path, config: DataConfig) -> bool:
    return target.exists() and (config.sha256 is None or config.sha256 == file_sha256(target))


def _fetch(config: DataConfig, target: Path) -> None:
    assert config.url is not None
    beside = target.with_name(target.name + ".tmp")
    print(f"data={config.name}: downloading {config.url}", file=sys.stderr)
    try:
        with urllib.request.urlopen(config.url, timeout=10) as answer:
            length = answer.headers.get("Content-Length", "")
            expected = int(length) if length.isdecimal() else None
            with explained(target, lambda: expected), open(beside, "wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        if expected is not None and beside.stat().st_size != expected:
            raise OSError(f"it broke off after {beside.stat().st_size:,} of {expected:,} bytes")
        digest = file_sha256(beside)
        if config.sha256 not in (None, digest):
            raise UserError(
                f"{config.url} does not have the expected content (sha256 {digest}, expected {config.sha256}); "
                "get the file by other means and give it with data.path."
            )
        os.replace(beside, target)
    except (OSError, http.client.HTTPException) as error:
        put = f"put the file at data/raw/{config.local}, or " if config.local and "*" not in config.local else ""
        raise UserError(
            f"data={config.name} cannot be downloaded from {config.url} ({getattr(error, 'reason', error)}). Without "
            f"network, {put}give it with data.path=<file>. {_OFFLINE_CHOICES}"
        ) from None
    finally:
        beside.unlink(missing_ok=True)


def hub_tokenizer(config: TokenizerConfig) -> Path:
    """The tokenizer.json of a hub model: a local copy, the hub's cache, or a download."""
    for name in (config.local, config.hub):
        if name and (copy := local_copy(name)) and (copy / "tokenizer.json").is_file():
            return copy / "tokenizer.json"
    if not config.hub:
        raise UserError("tokenizer.kind=hub needs tokenizer.hub, for example tokenizer.hub=openai-community/gpt2.")
    from huggingface_hub import hf_hub_download

    from polarlm.data.read.hub import go_offline_without_network

    go_offline_without_network()
    try:
        return Path(hf_hub_download(config.hub, "tokenizer.json", revision=config.revision))
    except Exception as error:  # the hub client has a dozen kinds of failure; all mean that the file is not here
        raise UserError(
            f"The tokenizer {config.hub} is neither in the cache nor reachable ({type(error).__name__}). Put its "
            f"tokenizer.json at data/raw/{config.local or config.hub}/tokenizer.json, give tokenizer.path=<file>, or "
            "use tokenizer=bpe, which learns its own."
        ) from None
