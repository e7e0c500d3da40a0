"""Run folders → runs in memory: found by pattern, read in parallel, tolerant of running, killed and damaged ones."""

import glob
import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from polarlm.block_keys import brief_block
from polarlm.data.atomic import parse_json
from polarlm.errors import UserError
from polarlm.runs.files import parse_config, printable, require_plain_files
from polarlm.runs.identity import flatten, with_additions
from polarlm.runs.measurements import MAX_PROBES, Metrics, StoredProbe, read_metrics, read_probes

FILES = ("config.yaml", "summary.json", "metrics.jsonl", "diagnostics/probe.jsonl")
# A run that says "running" but has not written for so long was killed (or its machine went away).
SILENT_AFTER_SECONDS = 15 * 60
MAX_NUMBER = 1e300
MAX_DEPTH = 3  # how deep `compare runs` looks below the folder it was given


@dataclass(frozen=True)
class Run:
    """One run folder as read from disk."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: Metrics
    probes: list[StoredProbe]
    status: str  # finished, failed, running, or stopped (killed while running)
    tokenizer: str  # equal for runs whose perplexities are per the same tokens
    problems: tuple[str, ...] = field(default=())

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as dotted keys."""
        if not self.config:
            return {}
        config = with_additions(self.config)
        return dict(flatten(config | {"block": brief_block(config["block"])} if "block" in config else config))

    @property
    def name(self) -> str:
        return printable(self.summary.get("name") or self.config.get("name") or self.folder.name)

    @property
    def block(self) -> str:
        """The block's name: the choice of the `block` group, else the class it was built from."""
        choice = self.summary.get("block") or (self.config.get("choices") or {}).get("block")
        target = self.config.get("block")
        if isinstance(target, dict):
            target = str(target.get("_target_", "unknown")).rpartition(".")[2]
        return printable(choice or target or "unknown")

    @property
    def seed(self) -> int:
        seed = self.summary.get("seed", self.config.get("seed", 0))
        return int(seed) if isinstance(seed, (int, float)) and abs(seed) < MAX_NUMBER else 0

    def number(self, name: str) -> float | None:
        """A number of the summary, or the newest one in the metrics of an unfinished run; None when it has none."""
        value = self.summary.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if abs(value) < MAX_NUMBER else None  # neither nan nor 10**400, which is no float
        if self.status == "finished" and name in self.summary:
            return None  # the end of a diverged run: an earlier number must not stand in for it
        column = self.metrics.columns.get(name)
        if column is None or len(column) == 0:
            return None
        known = column[~(column != column)]
        return float(known[-1]) if len(known) else None

    @property
    def flops(self) -> float | None:
        """Training FLOPs spent."""
        per_token, tokens = self.number("flops_per_token"), self.number("tokens")
        return per_token * tokens if per_token and tokens else self.number("flops")


def find_run_folders(patterns: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Every run folder that the patterns name or contain, sorted, each once."""
    wanted = [str(p) for p in patterns]
    folders: dict[Path, None] = {}
    for pattern in wanted:
        named = [pattern] if os.path.exists(pattern) else glob.glob(os.path.expanduser(pattern))
        for path in sorted(named):
            for folder in _run_folders_below(Path(path), MAX_DEPTH):
                folders[Path(os.path.abspath(folder))] = None
    if not folders:
        where = ", ".join(wanted) or "(nothing given)"
        raise UserError(
            f"No run folder found in {where}. A run folder holds config.yaml and metrics.jsonl; "
            "train one with `polarlm train`, then `python -m polarlm compare runs/*`"
        )
    return sorted(folders, key=lambda p: _natural(str(p)))


def read_run(folder: Path, max_probes: int = MAX_PROBES) -> Run:
    """Read one run folder; whatever is missing or damaged is left out and named in `problems`."""
    require_plain_files(folder)
    problems: list[str] = []
    config = _read(folder / "config.yaml", parse_config, problems)
    summary = _read(folder / "summary.json", parse_json, problems)
    metrics = read_metrics(folder / "metrics.jsonl")
    probes, torn = read_probes(folder / "diagnostics" / "probe.jsonl", max_probes)
    if metrics.unreadable:
        problems.append(f"metrics.jsonl: {metrics.unreadable} unreadable line(s)")
    if torn:
        problems.append(f"probe.jsonl: {torn} unreadable line(s)")
    status = str(summary.get("status") or "running")
    if status == "running" and time.time() - _last_write(folder) > SILENT_AFTER_SECONDS:
        status = "stopped"
    return Run(folder, config, summary, metrics, probes, status, _tokenizer(folder, config), tuple(problems))


def read_runs(folders: Sequence[Path], cache: dict[Path, tuple[Any, Run]] | None = None) -> list[Run]:
    """Read many run folders in parallel; with a cache, only those that changed since the last call."""
    max_probes = MAX_PROBES if len(folders) <= 30 else 12
    cache = {} if cache is None else cache

    def load(folder: Path) -> Run:
        signature = [_signature(folder / name) for name in FILES]
        known = cache.get(folder)
        if known and known[0] == signature and known[1].status != "running":
            return known[1]
        run = read_run(folder, max_probes)
        cache[folder] = (signature, run)
        return run

    # pyarrow parses without holding the interpreter lock, so threads help.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(load, folders))


def _run_folders_below(path: Path, depth: int) -> list[Path]:
    if not path.is_dir() or path.name.startswith("."):
        return []
    if (path / "config.yaml").exists() or (path / "metrics.jsonl").exists():
        return [path]
    if depth == 0:
        return []
    return [folder for child in sorted(path.iterdir()) for folder in _run_folders_below(child, depth - 1)]


def _read(path: Path, parse: Any, problems: list[str]) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError, OSError, RecursionError) as error:
        problems.append(f"{path.name}: {printable((str(error).splitlines() or [type(error).__name__])[0])}")
        return {}
    return value if isinstance(value, dict) else {}


def _tokenizer(folder: Path, config: dict[str, Any]) -> str:
    """A fingerprint of the saved tokenizer's files, or of its configuration where none was saved."""
    files = sorted(p for p in (folder / "tokenizer").glob("*") if p.is_file())
    if files:
        total = 0
        for file in files:
            total = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), total))
        return f"{total:08x}"
    return json.dumps(config.get("tokenizer"), sort_keys=True, default=str)


def _last_write(folder: Path) -> float:
    return max((s[0] for name in FILES if (s := _signature(folder / name))), default=0.0)


def _signature(path: Path) -> tuple[float, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime, status.st_size


def _natural(text: str) -> list[tuple[int, int | str]]:
    """seed10 after seed9."""
    import re

    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]
