"""The numbers we promise, measured in one run of about ten minutes on a quiet machine, beside what was promised.

    python -m benchmarks.goals [--quick] [--only d384 small peers memory decoding neighbour]

Prints Markdown tables (docs/performance.md holds the last ones) and writes benchmarks/results/goals.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.blocks import BLOCKS, VOCABULARY, build, training_step
from benchmarks.decoding import decoding
from benchmarks.memory import memory_against_context
from benchmarks.neighbour import with_a_neighbour
from benchmarks.peers import LIKE_GELU, OURS, OURS_GELU, candidates
from benchmarks.run import RESULTS
from benchmarks.timing import ratios, turns
from polarlm.training.hardware import measured_peak

CHOSEN = list(BLOCKS)
SMALL = dict(d_model=128, n_layer=4, n_head=4)
YARDSTICK = SMALL | dict(vocab_size=65)  # nanoGPT's CPU set-up: characters, context 64, batch 12
# What a block may cost relative to `standard`, by context at d 384, and at the small shapes.
ALLOWED = {
    256: {"xsa": 1.03, "rfa": 1.10, "polar": 1.08, "polar_paper": 1.12},
    1024: {"xsa": 1.03, "rfa": 1.15, "polar": 1.12, "polar_paper": 1.20},
    "small": {"polar": 1.35, "polar_paper": 1.35},
}


def steps(shape_name: str, allowed: dict[str, float], context: int, batch: int, rounds: int, **shape) -> list[dict]:
    """Whole training steps of every chosen block, interleaved."""
    vocabulary = shape.get("vocab_size", VOCABULARY)
    models = {name: build(name, context, **shape) for name in CHOSEN}
    measured = ratios(
        turns(
            {name: training_step(m.loss, m, batch, context, vocabulary) for name, m in models.items()}, rounds, warmup=1
        ),
        "standard",
    )
    return [
        {"shape": shape_name, "block": name, **row, "goal": allowed.get(name.partition(",")[0])}
        for name, row in measured.items()
    ]


def d384(quick: bool) -> list[dict]:
    """d 384, 6 layers, vocabulary 4,096, 4,096 tokens per step."""
    tokens, rounds = (256, 1) if quick else (4096, 5)
    shape = dict(n_layer=1, d_model=96) if quick else {}
    return [
        row
        for context in (256, 1024)
        for row in steps(
            f"d 384, context {context}", ALLOWED[context], context, max(1, tokens // context), rounds, **shape
        )
    ]


def small(quick: bool) -> list[dict]:
    """The yardstick (characters, context 64, batch 12) and `model=nano` (context 128, 1,024 tokens)."""
    rounds = 2 if quick else 40
    allowed = ALLOWED["small"]
    rows = steps("yardstick", allowed, 64, 12, rounds, **YARDSTICK)
    return rows + steps("nano", allowed, 128, 8, rounds, **SMALL)


def peers(quick: bool) -> list[dict]:
    """Our `standard` against other models; `ours` above 1 means that ours is faster."""
    rows = []
    shapes: list[tuple[str, int, int, int, dict[str, int]]] = [
        ("d 384, context 256", 256, 16, 5, {}),
        ("d 384, context 1024", 1024, 4, 4, {}),
        ("yardstick", 64, 12, 60, YARDSTICK),
    ]
    for name, context, batch, rounds, shape in shapes[2:] if quick else shapes:
        made, sizes = candidates(context, batch, **shape)
        spent = turns(made, 2 if quick else rounds, warmup=1)
        for model in made:
            base = OURS_GELU if model in LIKE_GELU else OURS
            row: dict[str, Any] = ratios({base: spent[base], model: spent[model]}, base)[model]
            row |= {"ours": row["ratio"], "goal": 1.0 if model not in (OURS, OURS_GELU) else None}
            rows.append({"shape": name, "model": model, "parameters": sizes[model], **row})
    return rows


def memory(quick: bool) -> list[dict]:
    """Peak memory that training steps add to an idle model, 8,192 tokens per batch."""
    contexts, tokens = ((128,), 256) if quick else ((256, 1024, 4096), 8192)
    rows = memory_against_context(("standard", "polar", "polar_paper"), contexts, tokens)
    return [row | {"goal": 1.2 if row["block"] != "standard" else None} for row in rows]


def decode(quick: bool) -> list[dict]:
    """Tokens of `model=nano` and of d 384 on one thread, one row and sixteen."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for name, shape in (("nano", SMALL), ("d 384", {})):
            for batch in (1, 16):
                if quick and (name, batch) != ("nano", 1):
                    continue
                length = 20 if quick else (128 if name == "nano" else 256)
                for row in decoding(("standard", "xsa", "rfa", "polar", "polar_paper"), length, batch, **shape):
                    rows.append({"shape": name, **row, "goal": 1.5 if "polar" in row["block"] else None})
        return rows
    finally:
        torch.set_num_threads(threads)


def neighbour(quick: bool) -> list[dict]:
    """d 384, context 1,024: how much a step slows down beside one busy process."""
    if quick:
        return with_a_neighbour(("standard", "polar"), 64, 128, 1, **SMALL)
    return with_a_neighbour(("standard", "polar", "polar_paper"), 1024, 4096, 5)


PARTS: dict[str, Callable[[bool], list[dict]]] = {
    "d384": d384, "small": small, "peers": peers, "memory": memory, "decoding": decode, "neighbour": neighbour,
}  # fmt: skip


def markdown(rows: list[dict]) -> str:
    """Rows as a Markdown table; a goal that is missed is marked."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(row: dict, column: str) -> str:
        value = row.get(column)
        if value is None:
            return ""
        return (
            f"{value:.3g}"
            if isinstance(value, float) and value < 1000
            else f"{value:,.0f}"
            if isinstance(value, (int, float))
            else str(value)
        )

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row, column) for column in columns) + " |" for row in rows])


def main() -> None:
    """Measure every part, print it, and keep what has been measured so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=CHOSEN, help="of whole steps, `standard` first")
    options = parser.parse_args()
    CHOSEN[:] = options.blocks
    RESULTS.mkdir(exist_ok=True)
    about = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "matmul_peak_gflops": measured_peak() / 1e9,
    }
    print(json.dumps(about), flush=True)
    results: dict[str, list[dict]] = {}
    for name in options.only:
        began = time.perf_counter()
        results[name] = PARTS[name](options.quick)
        print(f"\n{name} ({time.perf_counter() - began:.0f} s)\n{markdown(results[name])}", flush=True)
        (RESULTS / "goals.json").write_text(json.dumps({"about": about, **results}, indent=1))


if __name__ == "__main__":
    main()
