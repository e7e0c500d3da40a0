"""Verbs that use a trained run: `python -m polarlm generate`."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add the verb `generate`."""
    p = verbs.add_parser("generate", help="write text with a trained run", description="Write text with a trained run.")
    p.add_argument("folder", metavar="run", help="run folder, or a .ckpt or .safetensors file inside one")
    p.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    p.add_argument("--tokens", type=int, default=200, help="how many tokens to write (default 200)")
    p.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token each time (default 0.8)"
    )
    p.add_argument("--top-k", type=int, default=None, help="sample from the k most likely tokens")
    p.add_argument("--top-p", type=float, default=None, help="sample from the smallest set with this probability")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.set_defaults(run=generate)


def generate(options: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    from polarlm.evaluation.generate import sample_text
    from polarlm.evaluation.visible import visible_text
    from polarlm.runs.restore import restore_run

    run = restore_run(options.folder, options.device)
    text = sample_text(
        run.model,
        run.tokenizer,
        options.prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    print(visible_text(options.prompt + text))
    return 0
