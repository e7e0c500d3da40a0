"""A question and rows for it, made up: small, deterministic, plausible."""

from polarlm.settings import read_settings
from study.plan import Question
from study.summaries import Summary

PART = {
    "title": "Letters",
    "variants": {"standard": ["block=standard"], "polar": ["block=polar"]},
    "baseline": "standard",
}


def question(**part) -> Question:
    given = {"number": 1, "title": "Which?", "question": "Which block?", "rule": "all seeds.", "seeds": [1, 2, 3]}
    given |= {"parts": {"letters": {**PART, **part}}, "name": "blocks", "settings": ["trainer=cpu"]}
    return read_settings(Question, given, "study.blocks")


def row(variant: str, seed: int, bits: float, **changes) -> dict:
    made = {
        "part": "letters", "variant": variant, "stage": "seeds", "value": None, "seed": seed, "status": "finished",
        "block": variant, "identity": f"{variant}{seed}", "command": f"python train.py block={variant} seed={seed}",
        "commit": "abc", "torch": "2", "val/loss": bits * 0.7, "val/bits_per_byte": bits, "parameters": 1000,
        "tokens": 1000, "flops_per_token": 6000, "seconds": 10, "seconds_per_step": 0.01,
        "curve": {"step": [1, 2, 4], "tokens": [250, 500, 1000], "seconds": [2.5, 5, 10],
                  "val/bits_per_byte": [bits + 1, bits + 0.5, bits]},
    }  # fmt: skip
    return made | changes


def summary(gap: float = -0.02) -> Summary:
    """Three paired seeds; polar differs from standard by about `gap`."""
    made = Summary("blocks")
    for seed, noise in ((1, 0.0), (2, 0.001), (3, -0.001)):
        for variant, bits in (("standard", 2.0), ("polar", 2.0 + gap + noise)):
            settings = {"block._target_": variant, "model.d_model": 8, "model.n_head": 2, "tokenizer.kind": "char"}
            made.add(row(variant, seed, bits + 0.1 * seed), settings)
    return made
