"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polarlm.columns import indented
from polarlm.errors import typed_command
from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.training.loggers.short_numbers import clock, short


def final_table(summary: dict[str, Any], folder: Path, sample: str | None) -> str:
    """Plain text: what was reached, against what, how fast, where it lies, and how the model writes."""
    lines = metric_lines(summary)
    facts = [
        ("block", str(summary["block"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("tokens", speed(summary)),
        ("compute", f"{spaced(short(summary['flops_per_token']))}FLOPs per token" + share_of_peak(summary.get("mfu"))),
        ("step", step_split(summary.get("step_seconds") or {})),
        ("run folder", str(folder)),
        ("pictures", ", ".join(str(p) for p in sorted(folder.glob("*.png"))) or "none"),
    ]
    lines += undertrained_note(summary)
    lines += ["", *(f"  {name:<10}  {value}" for name, value in facts)]
    if sample:
        lines += ["", "  sample", *(f"    {line}" for line in sample.splitlines())]
    return "\n".join(lines)


def next_steps(folder: Path) -> str:
    """What to type after a single run: write text, evaluate, compare."""
    commands = [
        (f'python -m polarlm generate {folder} --prompt "The "', "write more text"),
        (f"{typed_command('eval')} checkpoint={folder} protocol=length", "read longer contexts than it was trained on"),
        (f"{typed_command('train')} -m block=standard,xsa,polar seed=1,2,3", "train three blocks on three seeds"),
        (f"python -m polarlm compare {folder.parent}", "then compare them: report.html"),
    ]
    return "\n".join(["", "  next", *(f"    {command}\n      {why}" for command, why in commands)])


def metric_lines(summary: dict[str, Any]) -> list[str]:
    """A row per judged split and per baseline, a column per metric that any of them has."""
    numbers = {
        name: {metric.name: summary.get(f"{split}/{metric.name}") for metric in METRICS}
        for split, name in (("val", "validation"), ("test", "test"))
        if f"{split}/loss" in summary
    }
    numbers |= {f"{name} baseline": values for name, values in (summary.get("baselines") or {}).items()}
    shown = [m for m in METRICS if any(values.get(m.name) is not None for values in numbers.values())]
    rows = [["", *(metric.short for metric in shown)]]
    rows += [[name, *(formatted(m.name, values.get(m.name)) for m in shown)] for name, values in numbers.items()]
    return indented(rows)


def undertrained_note(summary: dict[str, Any]) -> list[str]:
    """A warning where counting pairs of tokens predicts better than the model does."""
    loss, bigram = summary.get("val/loss"), ((summary.get("baselines") or {}).get("bigram") or {}).get("loss")
    if loss is None or bigram is None or loss < bigram:
        return []
    return [
        "",
        "  Not yet better than the bigram table: undertrained, more steps needed before blocks can be compared.",
    ]


def spaced(number: str) -> str:
    """'1.5M' → '1.5 M', where a unit follows."""
    return f"{number[:-1]} {number[-1]}" if number[-1].isalpha() else f"{number} "


def speed(summary: dict[str, Any]) -> str:
    """Tokens, the seconds their training took, the speed of its steady state; other time is told apart."""
    seconds, total = summary.get("training_seconds"), summary["seconds"]
    if not seconds:
        return f"{summary['tokens']:,} in {clock(total)}"
    rate = summary.get("tokens_per_second")
    text = f"{summary['tokens']:,} in {clock(seconds)} of training"
    text += f" ({short(rate)} tokens/s)" if rate else " (speed n/a: the first step only warms up)"
    if compiling := summary.get("compile_seconds"):
        text += f", {clock(compiling)} of it compiling"
    return f"{text}, {clock(total - seconds)} more for validation and diagnostics"


def share_of_peak(mfu: float | None) -> str:
    """', 12 % of the hardware's peak', or nothing where that is not known."""
    return "" if mfu is None else f", {100 * mfu:.0f} % of the hardware's peak"


def step_split(parts: dict[str, float | None]) -> str:
    """'data 1 %, forward 30 %, …' of a typical step."""
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    total = sum(known.values())
    if not total:
        return "n/a"
    return f"{1000 * total:.0f} ms: " + ", ".join(
        f"{name} {100 * value / total:.0f} %" for name, value in known.items()
    )
