"""Everything `make bench` measures: a table on the screen, a JSON file and a picture in benchmarks/results/.

    python -m benchmarks.run [--only blocks attention memory decoding peers compiled extensions] [--rounds 7]

All ratios come from one run; nothing is compared with a number from another day.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.blocks import BLOCKS, attention_alone, extensions, whole_steps
from benchmarks.decoding import decoding
from benchmarks.memory import memory_against_context
from benchmarks.peers import peers
from benchmarks.timing import table
from polarlm.training.hardware import measured_peak

RESULTS = Path(__file__).with_name("results")
PARTS = ("blocks", "attention", "memory", "decoding", "peers", "compiled", "extensions")
COLUMNS = {
    "blocks": ["block", "context", "compiled", "ms", "ratio", "tokens/s", "mfu"],
    "compiled": ["block", "context", "compiled", "ms", "ratio", "tokens/s", "mfu"],
    "attention": ["attention", "context", "ms", "ratio"],
    "memory": ["block", "context", "MB", "ratio"],
    "decoding": ["block", "rows", "ms/token", "ratio", "tokens/s", "late/early"],
    "peers": ["model", "context", "parameters", "tokens/s", "ours", "mfu"],
    "extensions": ["block", "context", "ms", "ratio", "of minima", "in a round"],
}


def measure(part: str, tokens: int, rounds: int) -> list[dict]:
    """The rows of one part."""
    if part in ("blocks", "compiled"):
        compiled = part == "compiled"
        return [row for context in (256, 1024) for row in whole_steps(context, tokens, rounds, compiled)]
    if part == "attention":
        return [row for context in (256, 1024) for row in attention_alone(context, tokens, rounds)]
    if part == "memory":
        return memory_against_context(("standard", "polar"), (1024, 2048, 4096, 8192), 8192)
    if part == "extensions":
        return extensions(rounds)
    if part == "decoding":
        return decoding(("standard", "polar"), 1000)
    return [row for context in (256, 1024) for row in peers(context, tokens, rounds)]


def picture(results: dict[str, list[dict]], path: Path) -> None:
    """Step ratios and memory curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = results.get("blocks", []) + results.get("compiled", [])
    for number, name in enumerate(BLOCKS):
        mine = [row for row in rows if row["block"] == name]
        places = [index + 0.16 * (number - 2) for index in range(len(mine))]
        left.bar(places, [row["ratio"] for row in mine], width=0.15, label=name)
    labels = [f"{r['context']}{' compiled' if r['compiled'] else ''}" for r in rows if r["block"] == "standard"]
    left.set_xticks(range(len(labels)), labels)
    left.set(title="training step, relative to standard", xlabel="context", ylabel="time ratio")
    left.axhline(1, color="black", linewidth=0.8)
    left.legend(fontsize=7)
    for name in ("standard", "polar"):
        mine = [row for row in results.get("memory", []) if row["block"] == name]
        right.plot([row["context"] for row in mine], [row["MB"] for row in mine], marker="o", label=name)
    right.set(title="peak memory of a training step (8,192 tokens)", xlabel="context", ylabel="MB", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    about = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # above the number of cores: others were computing too
        "torch": torch.__version__,
        "matmul_peak_gflops": measured_peak() / 1e9,
        "tokens_per_step": options.tokens,
    }
    results: dict[str, list[dict]] = {}
    for part in options.only:
        results[part] = measure(part, options.tokens, options.rounds)
        print(f"\n{part}\n{table(results[part], COLUMNS[part])}", flush=True)
        # After every part, so that a run that is stopped leaves what it has measured.
        (RESULTS / "benchmarks.json").write_text(json.dumps({"about": about, **results}, indent=1))
        picture(results, RESULTS / "benchmarks.png")
    print(f"\nwritten to {RESULTS}/benchmarks.json and benchmarks.png")


if __name__ == "__main__":
    main()
