"""Damaged run folders, yaml files and commands for the readers: all but an answer or one sentence is a finding.

python -m tools.fuzz --minutes 60          prints every finding with the input that caused it; exit code 1 if any
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "x",
    "auto", "\x1b[2J", "${oc.env:HOME}", "../../x", "a" * 5000, [], [1], ["x"], [[]], {}, {"a": 1},
    {"_target_": "os.system"},
]  # fmt: skip
JSON_FILES = ("summary.json", "corpus.json", "environment.json", "incidents.json", "tokenizer/polarlm_tokenizer.json")


def mutated(tree: Any, chance: random.Random) -> Any:
    """A copy of a tree of plain values with one value changed, left out or added, anywhere."""
    if isinstance(tree, dict) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree))
        copy = dict(tree)
        if chance.random() < 0.15:
            del copy[key]
        elif chance.random() < 0.1:
            copy[chance.choice(["new", "_target_", "\x1b", ""])] = chance.choice(VALUES)
        else:
            copy[key] = mutated(tree[key], chance)
        return copy
    return chance.choice(VALUES)


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """Bytes with some of them changed, cut off or repeated."""
    position = chance.randrange(len(raw) + 1)
    kind = chance.randrange(4)
    if kind == 0:
        return raw[:position]
    if kind == 1:
        return raw[:position] + bytes([chance.randrange(256)]) + raw[position + 1 :]
    if kind == 2:
        return raw[:position] + raw[position // 2 : position] + raw[position:]
    return (
        raw[:position]
        + chance.choice([b"\\ud800", b"\0", b"[" * 5000, b"\xff", b"&a", b"*a", b"9" * 5000])
        + raw[position:]
    )


def change_run(folder: Path, chance: random.Random) -> str:
    """Change one file of a run folder; returns what was done."""
    kind = chance.random()
    if kind < 0.5:
        path = folder / "config.yaml"
        config = mutated(yaml.safe_load(path.read_text(encoding="utf-8")), chance)
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return f"config.yaml: {config!r}"[:3000]
    if kind < 0.6 and (tables := sorted(folder.rglob("*.jsonl"))):
        path = chance.choice(tables)
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        place = chance.randrange(len(rows))
        rows[place] = mutated(rows[place], chance)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return f"{path.name}: {rows[place]!r}"[:3000]
    if kind < 0.8:
        path = chance.choice([*(folder / name for name in JSON_FILES), *sorted(folder.glob("evaluations/*.json"))])
        known = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"a": {"b": 1}, "splits": {"train": {}}}
        )
        value = mutated(known, chance)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value), encoding="utf-8")
        return f"{path.name}: {value!r}"[:3000]
    path = chance.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    path.write_bytes(damaged(path.read_bytes(), chance))
    return f"{path.name}: bytes"


def as_before_parts(path: Path) -> None:
    """Write a stored configuration with the block's settings in their old flat form."""
    from polarlm.block_keys import flat_block
    from polarlm.runs.files import read_config, write_config

    config = read_config(path)
    write_config(path, {**config, "block": flat_block(config["block"])})


def read_folder(folder: Path, *, thorough: bool) -> None:
    """What the verbs do with a run folder that somebody gives them; describing and exporting it take a second."""
    from polarlm.launch.inspect import describe_run
    from polarlm.runs.export.folder import export_run
    from polarlm.runs.identity import known_runs
    from polarlm.runs.reading import read_run
    from polarlm.runs.restore import restore_run
    from polarlm.verdict.groups import group_runs

    known_runs(folder.parent)
    run = read_run(folder)
    group_runs([run])
    _ = run.settings, run.name, run.block, run.seed, run.flops
    restored = restore_run(folder, "cpu")
    if not thorough:
        return
    describe_run(restored)
    export_run(restored, folder.parent / "out")


def compare_folders(folder: Path) -> None:
    """What `polarlm compare` does with run folders of which one is damaged: the table, the page's data and the page."""
    from polarlm.cli import parser

    options = parser().parse_args(["compare", str(folder), "--text", "--csv", "-", "--out", str(folder / "page.html")])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options.run(options)


def read_yaml(place: Path, chance: random.Random) -> None:
    """A file of the user's own configs, chosen by name."""
    from polarlm.launch.overrides import _loader, plan_jobs
    from polarlm.locations import CONFIGS, own_configs

    group = chance.choice(["block", "model", "data", "tokenizer", "optim", "trainer", "experiment"])
    raw = chance.choice(sorted((CONFIGS / group).glob("*.yaml"))).read_bytes()
    if chance.random() < 0.5:
        raw = yaml.safe_dump(mutated(yaml.safe_load(raw), chance)).encode()
    else:
        raw = damaged(raw, chance)
    shutil.rmtree(place, ignore_errors=True)
    (place / "configs" / group).mkdir(parents=True)
    (place / "configs" / group / "mine.yaml").write_bytes(raw)
    with contextlib.chdir(place):
        _loader.cache_clear()
        try:
            plan_jobs(_loader(own_configs()), "train", [f"{group}=mine"], multirun=False)
        finally:
            _loader.cache_clear()


def read_command(chance: random.Random) -> list[str]:
    """A command line of settings with values of any kind."""
    from polarlm.launch.overrides import config_loader, flat_keys, plan_jobs

    loader = config_loader()
    base = plan_jobs(loader, "train", [], multirun=False).jobs[0].config
    keys = [key for key in flat_keys(base) if not key.startswith("choices")]
    words = [
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        "1e-320",
        "9" * 400,
        "x",
        "[]",
        "[1,2]",
        "{}",
        "{a:1}",
        "''",
        "${x}",
        "1,2",
        "glob(*)",
    ]
    return [f"{chance.choice(keys)}={chance.choice(words)}" for _ in range(chance.randint(1, 3))]


def fuzz(minutes: float, seed: int, report: Callable[[str], None], inputs: float = float("inf")) -> int:
    """Try until the time or the number of inputs is over; returns the number of different findings."""
    from polarlm.launch.entry import exit_code, message
    from polarlm.launch.overrides import config_loader, plan_jobs
    from tests.runs.made_up_run import made_up_run
    from tests.synthetic_runs import write_run

    warnings.simplefilter("ignore")
    findings: set[str] = set()
    until, number = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory() as place:
        made_up_run(Path(place) / "sound", "polar")
        shutil.copytree(Path(place) / "sound", Path(place) / "older")
        as_before_parts(Path(place) / "older" / "config.yaml")
        for block in ("standard", "polar"):
            write_run(Path(place) / "judged" / block, block, steps=40, probe_every=20, evaluations=True)
        while time.monotonic() < until and number < inputs:
            number += 1
            chance = random.Random(f"{seed}/{number}")
            given = ""
            try:
                if number % 20 == 0:
                    command = read_command(chance)
                    given = " ".join(command)
                    plan_jobs(config_loader(), "train", command, multirun=False)
                elif number % 20 == 10:
                    read_yaml(Path(place) / "user", chance)
                elif number % 5 == 0:
                    shutil.rmtree(Path(place) / "tried", ignore_errors=True)
                    shutil.copytree(Path(place) / "judged", Path(place) / "tried")
                    given = change_run(Path(place) / "tried" / "polar", chance)
                    compare_folders(Path(place) / "tried")
                else:
                    shutil.rmtree(Path(place) / "tried", ignore_errors=True)
                    folder = Path(
                        shutil.copytree(Path(place) / chance.choice(["sound", "older"]), Path(place) / "tried" / "run")
                    )
                    given = change_run(folder, chance)
                    read_folder(folder, thorough=chance.random() < 0.1)
            except Exception as error:
                if exit_code(error) == 2 and message(error).count("\n") == 0:
                    continue
                last = traceback.extract_tb(error.__traceback__)[-1]
                name = f"{type(error).__name__} in {last.filename}:{last.lineno}"
                if name not in findings:
                    findings.add(name)
                    where = f"input {number}: {given[:1500]!r}"
                    report(f"{name}: {str(error)[:200]!r}\n  {where}\n{traceback.format_exc(limit=-6)}")
    report(f"{number} inputs, {len(findings)} findings (seed {seed})")
    return len(findings)


def main() -> int:
    """Read the arguments and try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return 1 if fuzz(options.minutes, options.seed, lambda text: print(text, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
