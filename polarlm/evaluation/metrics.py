"""The one table of metrics: the counts on a text, and every number computed from them.

A metric is one row of `METRICS`: validation, `eval.py`, the final table, metrics.jsonl, wandb, the
report and its CSV read this table. It imports nothing heavy, so any module can import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class TextSize:
    """How long a text is in every unit; `tokens` includes end-of-text tokens, which stand for no bytes."""

    tokens: int
    bytes: float
    characters: float
    words: int


@dataclass(frozen=True)
class Tally:
    """What was counted when a model read a text: summed loss, targets that counted, hits, and the text's size."""

    nats: float
    targets: int
    text: TextSize
    correct: int | None = None  # None where only losses are known (n-gram baselines)


@dataclass(frozen=True)
class Metric:
    """A number people compare: its name in files, how it is made, and how it is spoken of."""

    name: str
    title: str
    short: str  # for the head of a column: a table fits 80 characters
    unit: str
    better: Literal["lower", "higher"]
    description: str
    formula: Callable[[Tally], float | None]
    digits: int = 4  # after the point, in tables
    comparable: bool = False  # across tokenizers
    is_log: bool = False  # the exponential of a loss: means, differences and intervals are taken of its logarithm


def loss(tally: Tally) -> float:
    """Nats per counted target."""
    return tally.nats / tally.targets if tally.targets else math.nan


def loss_per(tally: Tally, units: float) -> float:
    """Nats per byte, word or character: every token of the text costs the mean loss, also one that was no target."""
    return loss(tally) / (units / tally.text.tokens) if units and tally.text.tokens else math.nan


def bits_per_byte(tally: Tally) -> float:
    """log₂ of one over the probability given to a byte: nats per byte / ln 2."""
    per_token = tally.text.bytes / tally.text.tokens if tally.text.tokens else 0.0
    return loss(tally) / math.log(2) / per_token if per_token else math.nan


def exponential(nats: float) -> float:
    """exp, with infinity where a float ends."""
    return math.exp(nats) if not nats >= 700 else math.inf


METRICS = (
    Metric(
        "loss", "loss", "loss", "nats per token", "lower",
        "Mean −ln p of the next token.",
        loss,
    ),
    Metric(
        "perplexity", "perplexity", "perplexity", "per token", "lower",
        "exp(loss): as unsure as a fair choice among so many tokens.",
        lambda tally: exponential(loss(tally)),
        digits=2, is_log=True,
    ),
    Metric(
        "bits_per_byte", "bits per byte", "bits/byte", "bits per byte", "lower",
        "Loss in bits, per byte of the text instead of per token: comparable across tokenizers.",
        bits_per_byte,
        comparable=True,
    ),
    Metric(
        "word_perplexity", "word perplexity", "ppl/word", "per word", "lower",
        "exp of the nats per word (words end at white space): comparable across tokenizers.",
        lambda tally: exponential(loss_per(tally, tally.text.words)),
        digits=2, comparable=True, is_log=True,
    ),
    Metric(
        "character_perplexity", "character perplexity", "ppl/char", "per character", "lower",
        "exp of the nats per character of the text: comparable across tokenizers.",
        lambda tally: exponential(loss_per(tally, tally.text.characters)),
        comparable=True, is_log=True,
    ),
    Metric(
        "accuracy", "accuracy", "accuracy", "share of targets", "higher",
        "Share of targets that the model held more likely than every other token; a tie is wrong.",
        lambda tally: None if tally.correct is None else tally.correct / tally.targets if tally.targets else math.nan,
    ),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
SPLITS = ("train", "val", "test")


def measure(tally: Tally) -> dict[str, float]:
    """Every metric of the table that these counts allow, by name."""
    values = {metric.name: metric.formula(tally) for metric in METRICS}
    return {name: value for name, value in values.items() if value is not None}


def metric_of(name: str) -> Metric | None:
    """The row behind a name with or without its split (`val/bits_per_byte`), None for anything else (`train/lr`)."""
    split, _, last = name.rpartition("/")
    return BY_NAME.get(last) if split in ("", *SPLITS) else None


def split_metrics(names: Iterable[str]) -> list[str]:
    """The names that are a metric on a split, splits and metrics in the table's order."""
    known = [f"{split}/{metric.name}" for split in SPLITS for metric in METRICS]
    present = set(names)
    return [name for name in known if name in present]


def formatted(name: str, value: Any) -> str:
    """A value with the digits its metric has in tables; `–` where there is none."""
    metric = metric_of(name)
    if value is None or metric is None:
        return "–" if value is None else f"{value:.6g}"
    return f"{value:,.{metric.digits}f}" if abs(value) < 1e5 else f"{value:.3g}"
