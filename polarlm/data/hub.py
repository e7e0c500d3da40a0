"""Where the text of a named corpus is: a local copy, a download, the Hugging Face hub, or this Python installation."""

from __future__ import annotations

import ast
import functools
import glob
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from polarlm.data.atomic import explained, file_sha256, locked, write_beside
from polarlm.data.config import DataConfig
from polarlm.data.readers import Unit, dataset_pieces, file_units
from polarlm.errors import UserError
from polarlm.network import reachable
from polarlm.printing import say_once

if TYPE_CHECKING:
    from polarlm.data.tokenizer import TokenizerConfig


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

    go_offline_without_network()
    try:
        return Path(hf_hub_download(config.hub, "tokenizer.json", revision=config.revision))
    except Exception as error:  # the hub client has a dozen kinds of failure; all mean that the file is not here
        raise UserError(
            f"The tokenizer {config.hub} is neither in the cache nor reachable ({type(error).__name__}). Put its "
            f"tokenizer.json at data/raw/{config.local or config.hub}/tokenizer.json, give tokenizer.path=<file>, or "
            "use tokenizer=bpe, which learns its own."
        ) from None


def hub_units(config: DataConfig) -> list[Unit]:
    """The splits of a hub dataset that a corpus uses, file by file where it is streamed."""
    hub = config.hub
    assert hub is not None
    # A dataset with nothing but a train split is divided by data.split.
    has_splits = len(hub.named_splits) > 1
    units = []
    for ours, theirs in hub.named_splits.items():
        shards = open_dataset(config, theirs).num_shards if _streamed(config) else 1
        for number in range(shards):
            name = f"{hub.name}:{theirs}" + (f":{number}" if shards > 1 else "")
            opened = functools.partial(_shard, config, theirs, shards, number)
            pieces = functools.partial(dataset_pieces, opened, name, "dataset", config)
            units.append(Unit(name, ours if has_splits else None, pieces))
    return units


def _shard(config: DataConfig, split: str, shards: int, number: int) -> Any:
    dataset = open_dataset(config, split)
    return dataset.shard(shards, number) if shards > 1 else dataset


def hub_identity(config: DataConfig) -> str:
    """Identifies the text without asking the hub: the pinned revision, or the files of a local copy."""
    hub = config.hub
    assert hub is not None
    if not hub.name:
        raise UserError("data.hub.name is missing; for example data.hub.name=roneneldan/TinyStories.")
    folder = local_repository(hub.name)
    state: Any = hub.revision
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        state = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = (hub.name if folder is None else "copy", hub.config, sorted(hub.named_splits.items()), state)
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _streamed(config: DataConfig) -> bool:
    return config.streaming or (config.hub is not None and config.hub.fetch == "stream")


def local_repository(name: str) -> Path | None:
    """A folder holding a copy of the hub repository: a path, or data/raw/<owner>/<name>."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    copy = local_copy(name)
    return copy if copy is not None and copy.is_dir() else None


def open_dataset(config: DataConfig, split: str) -> Any:
    """The dataset of one split, opened once per process."""
    hub = config.hub
    assert hub is not None
    return _load(hub.name, hub.config, hub.revision, split, _streamed(config), config.name)


@functools.lru_cache(maxsize=16)
def _load(name: str, subset: str | None, revision: str | None, split: str, streaming: bool, corpus: str) -> Any:
    folder = local_repository(name)
    options: dict[str, Any] = {"split": split, "streaming": streaming}
    if folder is None:
        go_offline_without_network()
        options |= {"path": name, "name": subset, "revision": revision}
    elif subset and (folder / subset).is_dir() and not (folder / "README.md").exists():
        options |= {"path": str(folder), "data_dir": subset}
    else:
        options |= {"path": str(folder), "name": subset}
    from datasets import disable_progress_bars, load_dataset

    if not os.isatty(2):
        disable_progress_bars()
    try:
        return load_dataset(**options)
    except Exception as error:  # the hub client has a dozen kinds of failure
        where = folder or f"the hub ({name}, config {subset}, revision {revision})"
        words = str(error).splitlines()[0][:200].rstrip(".") if str(error) else "no reason given"
        raise UserError(
            f"data={corpus}: split {split!r} cannot be read from {where}: {type(error).__name__}: {words}. "
            f"{_what_to_do(name, words)}"
        ) from None


def _what_to_do(name: str, words: str) -> str:
    if "gated" in words or "authenticated" in words:
        page = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/datasets/{name}"
        return f"Accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN."
    if "Unknown split" in words:
        return (
            "Say which of its splits are ours, for example data.hub.splits.train=train data.hub.splits.val=validation."
        )
    return (
        f"Without network, put a copy of the dataset repository (README.md and data files) into data/raw/{name}/ "
        "or give files with data.path=<folder with train.*, valid.*, test.* as .txt, .jsonl, .csv or .parquet>; "
        "data=pydocs needs neither network nor files."
    )


def go_offline_without_network() -> None:
    """Tell the hub client within seconds that there is no network; by itself it tries for about 25 s, every time."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True") or reachable(hub):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets.config
    import huggingface_hub.constants

    # Both have read the variable if they were imported before.
    datasets.config.HF_HUB_OFFLINE = True
    huggingface_hub.constants.HF_HUB_OFFLINE = True


# -- the embedded corpus: the documentation of the Python installation itself, read without importing any of it --------


EXTRACTOR = 2  # raise it when the rules below change: the cached text is then written anew
_SKIPPED = ("test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__", "pydoc_data")
_GRAMMAR = re.compile(r"::=|^\s*\|", re.MULTILINE)


def pydocs_file(cache_dir: Path) -> Path:
    """The cached jsonl of the embedded corpus, extracted on first use (some seconds)."""
    target = cache_dir / f"pydocs-{platform.python_implementation()}-{platform.python_version()}-{EXTRACTOR}.jsonl"
    if target.exists():
        return target
    with explained(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(target):
        if not target.exists():
            lines = (json.dumps({"title": title, "text": text}) + "\n" for title, text in extract())
            write_beside(target, "".join(lines).encode())
    return target


def extract() -> Iterator[tuple[str, str]]:
    """Documents (title, text) in a fixed order, no paragraph occurring twice."""
    seen: set[str] = set()
    for title, text in _raw_documents():
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if not key or ">>>" in paragraph or _GRAMMAR.search(paragraph) or key in seen:
                continue
            seen.add(key)
            kept.append(paragraph.rstrip())
        document = "\n\n".join(kept).strip("\n")
        if len(document) >= 80:
            yield title, document + "\n"


def _raw_documents() -> Iterator[tuple[str, str]]:
    from pydoc_data import topics  # plain data: one dictionary of strings

    for name in sorted(topics.topics):
        yield f"topic {name}", topics.topics[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                docs = _docstrings(path)
                if docs:
                    yield str(path.relative_to(library)), "\n\n".join(docs)


def _docstrings(path: Path) -> list[str]:
    try:
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not our subject
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return []
    texts = (ast.get_docstring(node) for node in _definitions(tree))
    return [text for text in texts if text and "\x00" not in text]


def _definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Module, classes and functions in the order of the source; statements only, since ast.walk takes twice as long."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _definitions(child)
