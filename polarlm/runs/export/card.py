"""The model card: what a user should know before loading the weights."""

from __future__ import annotations

from typing import Any

from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.runs.files import printable, read_json
from polarlm.runs.reading import MAX_NUMBER
from polarlm.runs.restore import RestoredRun

ALONE = (
    "Nothing was compared: this is a single run, and a single run cannot show that one block is better than another."
)


def model_card(run: RestoredRun, *, remote: bool, verdict: str | None = None) -> str:
    """README.md of an exported folder: data, budget, numbers with their protocol, the verdict, how to load it."""
    config, summary = run.config, read_json(run.folder / "summary.json") or {}
    chosen, model = config.get("choices"), run.model.config
    choices = dict.fromkeys(("block", "data", "tokenizer"), "unknown")
    if isinstance(chosen, dict):
        choices |= {name: printable(value) for name, value in chosen.items()}
    rows = []
    for split in ("val", "test"):
        numbers = [(m, known_number(summary, f"{split}/{m.name}")) for m in METRICS]
        rows += [f"| {split} | {m.title} ({m.unit}) | {formatted(m.name, v)} |" for m, v in numbers if v is not None]
    tokens, flops, seconds = (known_number(summary, key) for key in ("tokens", "flops_per_token", "seconds"))
    seed = known_number(config, "seed")
    budget = [
        f"{run.model.parameter_count():,} parameters",
        f"{tokens:,} training tokens" if tokens else None,
        f"{flops:,} training FLOPs per token" if flops else None,
        f"{seconds:.0f} seconds" if seconds else None,
        f"seed {seed}" if seed is not None else None,
    ]
    splits = (read_json(run.folder / "corpus.json") or {}).get("splits")
    train = splits.get("train") if isinstance(splits, dict) else None
    counts = [(known_number(train, unit), unit) for unit in ("tokens", "bytes")] if isinstance(train, dict) else []
    size = "".join(f", {count:,} {unit}" for count, unit in counts if count is not None)
    trust = ", trust_remote_code=True" if remote else ""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [polarlm]",
        "---",
        f"# {run.folder.name}",
        "",
        f"A small language model with the `{choices['block']}` block, trained with polarlm as an experiment on "
        "transformer blocks. It continues text; it was not tuned to follow instructions, and it can say anything that "
        "its training text could make likely.",
        "",
        f"- **Data**: {choices['data']} (train split{size}), tokenizer {choices['tokenizer']}, "
        f"vocabulary {model.vocab_size:,}",
        f"- **Model**: {model.n_layer} layers, width {model.d_model}, {model.n_head} heads, context {model.context}",
        f"- **Budget**: {'; '.join(part for part in budget if part)}",
        "",
        "| split | metric | value |",
        "|---|---|---|",
        *rows,
        "",
        f"Measured on whole splits in windows of {model.context} tokens that do not overlap.",
        "",
        "## Is the block better?",
        "",
        verdict or ALONE,
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("."{trust})',
        f'tokenizer = AutoTokenizer.from_pretrained("."{trust})',
        "```",
        "",
    ]
    if remote:
        lines += [
            "transformers does not have this block, so its code is part of the repository: plain PyTorch, without the "
            "fast kernels of polarlm. Do not pad rows.",
            "",
        ]
    return "\n".join(lines)


def known_number(stored: dict[str, Any], key: str) -> int | float | None:
    """A number of a stored file; None if the file has none there, or one that no float holds."""
    value = stored.get(key)
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return value if right else None
