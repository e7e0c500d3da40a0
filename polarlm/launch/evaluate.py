"""Evaluation jobs: checkpoints and protocols in, numbers with their protocol out, on the screen and in the run folder.

Nothing heavy is imported before the question has been understood.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from polarlm.data.source import require_text
from polarlm.errors import UserError, did_you_mean, typed_command
from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.printing import aligned

# launch/protocols.py has a function for each; here so that a wrong name is told before anything heavy is imported.
PROTOCOL_NAMES = (
    "windows", "sliding", "position", "frequency", "length", "corruption", "shuffled", "calibration", "confidence",
    "documents", "rolling", "blimp", "lambada",
)  # fmt: skip
WITH_OWN_FILES = ("blimp", "lambada")  # not part of protocol=all: they read files that not everybody has
LISTS = ("checkpoint", "protocol", "lengths", "rates", "corruptions")  # keys that take several values: a,b,c


def as_lists(arguments: Sequence[str]) -> list[str]:
    """`checkpoint=a,b` as `checkpoint=['a','b']`: several values of one evaluation, not Hydra's sweep (-m)."""
    if {"-m", "--multirun"} & set(arguments):
        return list(arguments)
    lists = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key in LISTS and equals and value[:1] not in ("[", "'", '"', ""):
            quoted = [part.replace("\\", "\\\\").replace("'", "\\'") for part in value.split(",")]
            argument = f"{key}=[" + ",".join(f"'{part}'" for part in quoted) + "]"
        lists.append(argument)
    return lists


def evaluate_run(cfg: DictConfig) -> float:
    """Ask every checkpoint every protocol; prints, stores in the run folders, returns the first loss found."""
    if OmegaConf.is_missing(cfg, "checkpoint"):
        raise UserError(f"checkpoint must be given: {typed_command('eval')} checkpoint=runs/<name>")
    options: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    names = protocol_names(options["protocol"])
    checkpoints = find_checkpoints(_several(options["checkpoint"]))
    if options.get("data") is not None:
        require_text(options["data"])

    from polarlm.runs.files import write_json

    records = [record for checkpoint in checkpoints for record in judge(checkpoint, names, options)]
    summary: Any = flat_metrics(records[0]) if len(records) == 1 and "metrics" in records[0] else records
    if options["out"]:
        write_json(Path(options["out"]), summary)
        print(f"  written to {options['out']}")
    return next((float(r["metrics"]["loss"]) for r in records if "metrics" in r), float("nan"))


def protocol_names(given: Any) -> list[str]:
    """The protocols asked for, checked."""
    names = _several(given)
    if names == ["all"]:
        return [name for name in PROTOCOL_NAMES if name not in WITH_OWN_FILES]
    for name in names:
        if name not in PROTOCOL_NAMES:
            near = did_you_mean(name, PROTOCOL_NAMES)
            raise UserError(f"protocol={name} does not exist. {near}Choices: {', '.join(PROTOCOL_NAMES)}, all")
    return names


def find_checkpoints(places: Sequence[str]) -> list[str]:
    """Run folders and weight files as they are; a folder of run folders (a sweep's) gives the runs in it."""
    checkpoints = []
    for place in places:
        path = Path(place)
        if not path.exists():
            raise UserError(
                f"checkpoint={place} does not exist; give a run folder (runs/<name>), a folder of runs, or a .ckpt or "
                ".safetensors file inside a run"
            )
        inside = sorted(p.parent for p in path.glob("*/config.yaml")) if path.is_dir() else []
        if inside and not (path / "config.yaml").exists():
            finished = [p for p in inside if any((p / "checkpoints").glob("*.safetensors"))]
            if not finished:
                raise UserError(f"{path} holds {len(inside)} runs, but none of them has finished training")
            checkpoints += [str(p) for p in finished]
        else:
            checkpoints.append(place)
    return checkpoints


def judge(checkpoint: str, names: Sequence[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one checkpoint, printed and written to its run folder."""
    from polarlm.launch import protocols
    from polarlm.runs.measurements import write_evaluation
    from polarlm.runs.restore import restore_run

    run = restore_run(checkpoint, options["device"])
    split = options["split"]
    corpus = protocols.corpus_for(run, options)
    if split not in corpus.splits:
        raise UserError(f"split={split} does not exist; this corpus has {', '.join(corpus.splits)}")
    if corpus.probe is not None and (set(names) != {"windows"} or options["tokens"] or options["context"]):
        raise UserError(
            f"data={corpus.name} is a task whose targets are answers, not the next tokens: evaluate it as a "
            "whole, with protocol=windows"
        )
    task = protocols.EvaluationTask(run, corpus, split, options)
    print(f"{run.folder}  ({run.weights.name})")
    records = []
    for name in names:
        answer = getattr(protocols, f"run_{name}")(task)
        protocol = {
            "name": name,
            "data": corpus.name if options.get("data") else run.config["choices"]["data"],
            "split": split,
            "tokenizer": run.config["choices"]["tokenizer"],
            "context": task.context,
            "corpus": corpus.fingerprint,
            "weights": run.weights.name,
            **answer.asked,
        }
        record = {"protocol": protocol, **answer.numbers}
        written = write_evaluation(run.folder, record, answer.arrays)
        print("\n".join([*lines_of(record), f"    written to {written}"]))
        records.append({"run": str(run.folder), **record})
    return records


def flat_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """{split/metric: value, …, protocol}: the form in which one protocol of one run is told to other programs."""
    split = record["protocol"]["split"]
    return {
        **{f"{split}/{name}": value for name, value in record["metrics"].items()},
        "protocol": record["protocol"],
    }


def lines_of(record: dict[str, Any]) -> list[str]:
    """A record for people: metrics in one line, curves as columns, then the protocol."""
    protocol = record["protocol"]
    lines = [f"  {protocol['name']}, {protocol['split']}"]
    for name, value in record.items():
        if name == "metrics":
            lines.append("    " + metric_line(value))
        elif name not in ("protocol", "arrays"):
            lines += [f"    {line}" for line in table_of(value, name)]
    shown = {key: value for key, value in protocol.items() if key not in ("name", "split")}
    shown["corpus"] = shown["corpus"][:24]
    line = "protocol: " + ", ".join(f"{key} {value}" for key, value in shown.items())
    return [*lines, *textwrap.wrap(line, 80, initial_indent=" " * 4, subsequent_indent=" " * 6)]


def metric_line(values: dict[str, float]) -> str:
    """'loss 1.2345, perplexity 3.44, …' in the table's order."""
    return ", ".join(f"{m.title} {formatted(m.name, values[m.name])}" for m in METRICS if m.name in values)


def table_of(value: Any, name: str) -> list[str]:
    """Plain lines of whatever a protocol found: numbers, columns of equal length, nested groups."""
    if not isinstance(value, dict):
        return [f"{name} {_short(value)}"]
    value = long_form(value)
    columns = {key: column for key, column in value.items() if isinstance(column, list)}
    plain = {key: entry for key, entry in value.items() if not isinstance(entry, (dict, list))}
    lines = [", ".join(f"{key} {_short(entry)}" for key, entry in plain.items())] if plain else []
    simple = {key: column for key, column in columns.items() if all(not isinstance(x, (list, dict)) for x in column)}
    judged = columns.get("metrics") or []  # of each row: a row of the same table says which it belongs to
    shown = [m for m in METRICS if any(m.name in entry for entry in judged)]
    if simple or judged:
        cells = list(zip(*simple.values())) if simple else [()] * len(judged)
        metrics = [[formatted(m.name, entry.get(m.name)) for m in shown] for entry in judged] or [[]] * len(cells)
        rows = [[*map(_short, row), *numbers] for row, numbers in zip(cells, metrics)]
        head = [*(key.replace("_", " ") for key in simple), *(m.short for m in shown)]
        lines += aligned([head, *rows], first_left=head[0] == "kind")
    for key, entry in value.items():
        if isinstance(entry, dict):
            lines += [key, *(f"  {line}" for line in table_of(entry, key))]
    return lines


def long_form(value: dict[str, Any]) -> dict[str, Any]:
    """Groups whose columns are as long as the shared ones, as one table: a row per corruption and rate."""
    shared = {key: column for key, column in value.items() if isinstance(column, list)}
    groups = {key: group for key, group in value.items() if isinstance(group, dict)}
    columns = [*shared.values(), *(column for group in groups.values() for column in group.values())]
    lengths = {len(column) if isinstance(column, list) else 0 for column in columns}
    names = {tuple(group) for group in groups.values()}
    if not shared or len(names) != 1 or len(lengths) != 1:
        return value
    table = {"kind": [key for key in groups for _ in columns[0]]}
    table |= {key: column * len(groups) for key, column in shared.items()}
    table |= {name: [entry for group in groups.values() for entry in group[name]] for name in names.pop()}
    return {**{key: entry for key, entry in value.items() if key not in (*shared, *groups)}, **table}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def _several(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]
