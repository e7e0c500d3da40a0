"""The model card: what a user should know before loading the weights."""

from __future__ import annotations

from polarlm.evaluation.metrics import METRICS, formatted
from polarlm.runs.files import read_json
from polarlm.runs.restore import RestoredRun

ALONE = (
    "Nothing was compared: this is a single run, and a single run cannot show that one block is better than another."
)


def model_card(run: RestoredRun, *, remote: bool, verdict: str | None = None) -> str:
    """README.md of an exported folder: data, budget, numbers with their protocol, the verdict, how to load it."""
    config, summary = run.config, read_json(run.folder / "summary.json") or {}
    choices, model = config["choices"], run.model.config
    corpus = read_json(run.folder / "corpus.json") or {}
    rows = []
    for split in ("val", "test"):
        numbers = [(m, summary.get(f"{split}/{m.name}")) for m in METRICS]
        rows += [
            f"| {split} | {m.title} ({m.unit}) | {formatted(m.name, v)} |"
            for m, v in numbers
            if isinstance(v, int | float)
        ]
    budget = [
        f"{run.model.parameter_count():,} parameters",
        f"{summary['tokens']:,} training tokens" if summary.get("tokens") else None,
        f"{summary['flops_per_token']:,} training FLOPs per token" if summary.get("flops_per_token") else None,
        f"{summary['seconds']:.0f} seconds" if summary.get("seconds") else None,
    ]
    train = (corpus.get("splits") or {}).get("train") or {}
    size = f", {train['tokens']:,} tokens, {train['bytes']:,} bytes" if train else ""
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
        f"- **Budget**: {'; '.join(part for part in budget if part)}; seed {config['seed']}",
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
