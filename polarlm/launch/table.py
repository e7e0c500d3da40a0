"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polarlm.training.loggers.progress import clock, short


def final_table(summary: dict[str, Any], folder: Path, sample: str | None) -> str:
    """Plain text: what was reached, against what, how fast, where it lies, and how the model writes."""
    rows = [("", "loss", "perplexity", "bits per byte")]
    for split in ("val", "test"):
        if f"{split}/loss" in summary:
            rows.append(
                (
                    {"val": "validation", "test": "test"}[split],
                    f"{summary[f'{split}/loss']:.4f}",
                    f"{summary[f'{split}/perplexity']:.2f}",
                    f"{summary[f'{split}/bits_per_byte']:.4f}",
                )
            )
    for name, found in (summary.get("baselines") or {}).items():
        rows.append(
            (f"{name} baseline", f"{found['loss']:.4f}", f"{found['perplexity']:.2f}", f"{found['bits_per_byte']:.4f}")
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"  {row[0]:<{widths[0]}}  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:])) for row in rows
    ]
    peak = "n/a" if summary.get("mfu") is None else f"{100 * summary['mfu']:.0f} %"
    facts = [
        ("block", str(summary["block"])),
        ("parameters", f"{summary['parameters']:,}"),
        (
            "tokens",
            f"{summary['tokens']:,} in {clock(summary['seconds'])} ({short(summary['tokens_per_second'])} tokens/s)",
        ),
        (
            "compute",
            f"{short(summary['flops_per_token'])}FLOPs per token, {peak} of the hardware's peak",
        ),
        ("step", step_split(summary.get("step_seconds") or {})),
        ("run folder", str(folder)),
        ("pictures", ", ".join(str(p) for p in sorted(folder.glob("*.png"))) or "none"),
    ]
    lines += ["", *(f"  {name:<10}  {value}" for name, value in facts)]
    if sample:
        lines += ["", "  sample", *(f"    {line}" for line in sample.splitlines())]
    return "\n".join(lines)


def step_split(parts: dict[str, float | None]) -> str:
    """'data 1 %, forward 30 %, …' of a typical step."""
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    total = sum(known.values())
    if not total:
        return "n/a"
    return f"{1000 * total:.0f} ms: " + ", ".join(
        f"{name} {100 * value / total:.0f} %" for name, value in known.items()
    )
