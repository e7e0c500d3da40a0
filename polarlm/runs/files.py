"""The small files of a run folder: written atomically and read without trusting them."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from polarlm.block_keys import brief_block
from polarlm.data.atomic import explained, json_or_none, parse_json, write_beside
from polarlm.errors import UserError
from polarlm.targets import MOVED, renamed

LARGEST_CONFIG = 1 << 20  # bytes; ours have a few thousand
LARGEST_JSON = 1 << 26
ABANDONED_AFTER_SECONDS = 3600  # what another machine began to build
GROUPS = ("choices", "model", "block", "data", "tokenizer", "trainer", "optim", "schedule", "sample", "diagnostics")
PLACES = ("*", "checkpoints/*", "checkpoints/shards/*/*", "diagnostics/*", "tokenizer/*", "evaluations/*")
# libyaml is ten times faster and comes with PyYAML's wheels.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, making its folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file that holds an object (or a list), None when it does not exist; a damaged one is a UserError."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON:,} bytes")
        value = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(value, kind):
            raise ValueError(f"it holds no {'object' if kind is dict else kind.__name__}")
        return value
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is damaged ({reason}); restore it from a copy, or delete it") from error


def json_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds, for who can do without: nothing where it is missing, damaged or no object."""
    value = json_or_none(path)
    return value if isinstance(value, dict) else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, without damaged lines: the last one may be being written, or cut off by a kill."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(parse_json(line.decode()))
    return [row for row in rows if isinstance(row, dict)]


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a configuration as yaml, atomically."""
    write_text(path, yaml.dump(config, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True))


class _PlainDumper(yaml.SafeDumper):
    """Without aliases, which readers of a run folder refuse."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@contextlib.contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, to be filled and moved there; what killed processes left of such is removed."""
    _clean_up(folder)
    # The number of a killed process can be ours now (in a container it usually is), so a number is not enough.
    beside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.randbelow(10**9)}.new")
    with explained(folder):
        beside.mkdir(parents=True)
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # unless it was moved


def _clean_up(folder: Path) -> None:
    """Remove what killed processes began to build in this place."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.new"):
        made_here = re.fullmatch(r"(\d{1,9})(-\d{1,9})?", left.name[len(folder.name) + 2 : -len(".new")])
        with contextlib.suppress(OSError):
            if made_here and not left.is_symlink():
                gone = not is_alive(int(made_here[1]))
                if gone or time.time() - left.stat().st_mtime > ABANDONED_AFTER_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # and somebody else's
    return True


def require_plain_files(folder: Path) -> None:
    """Refuse a run folder in which a pipe or a device has the name of a file: reading one could go on for ever."""
    for pattern in PLACES:
        for path in folder.glob(pattern):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise UserError(f"{path} is a pipe or a device, which no run folder of ours holds; delete it")


def parse_config(text: str) -> dict[str, Any]:
    """A stored configuration as plain values: no aliases (they can make a small file endless), nothing interpolated."""
    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"it has {len(text):,} characters, more than any configuration")
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it holds YAML aliases, which no configuration of ours has")
        if isinstance(event, yaml.ScalarEvent):
            event.value.encode()  # half of a pair of surrogates could not be written again
    value = yaml.load(text, Loader=_SafeLoader)
    if not isinstance(value, dict):
        raise ValueError("it is not a configuration")
    for group in GROUPS:
        given = value.get(group, {})
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            raise ValueError(f"{group} is not a group of settings")
    brief_block(value.get("block"))  # refuses a block that is damaged
    return renamed(value, MOVED)


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's config.yaml, or say in one sentence why it can't be used."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a run folder: it has no config.yaml") from None
    except (ValueError, yaml.YAMLError, RecursionError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} can't be read: {reason}") from error


def printable(text: Any) -> str:
    """Text without what moves a terminal's cursor or changes its colours."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
