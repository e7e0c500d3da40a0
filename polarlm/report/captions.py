"""Captions made from the settings of the runs: settings that all share, settings of each block, and the protocol."""

from collections.abc import Sequence
from typing import Any

from polarlm.verdict.groups import Group, follows_from_block, shared_settings, short_key, show, usual_settings

# The settings a reader asks for first, in this order, and how they are said.
_SAID = (
    ("model.d_model", "d {}"),
    ("model.n_layer", "{} layers"),
    ("model.n_head", "{} heads"),
    ("model.context", "context {} tokens"),
    ("trainer.max_steps", "{} steps"),
    ("trainer.max_tokens", "{} training tokens"),
    ("trainer.batch_tokens", "{} tokens per step"),
    ("optim.lr", "learning rate {}"),
)


def shared_caption(groups: Sequence[Group]) -> str:
    """The settings that all runs share."""
    runs = [run for group in groups for run in group.runs]
    shared = shared_settings(groups)
    words = []
    for part in ("data", "tokenizer", "model"):
        chosen = {str((run.config.get("choices") or {}).get(part)) for run in runs} - {"None"}
        if len(chosen) == 1:
            words.append(f"{part} {chosen.pop()}")
    words += [text.format(_number(shared[key])) for key, text in _SAID if shared.get(key) is not None]
    return f"All runs: {' · '.join(words)}." if words else ""


def block_caption(groups: Sequence[Group]) -> str:
    """Settings that differ only because each block has its own."""
    settings: dict[str, str] = {}
    for key, values in follows_from_block(groups).items():
        if "." in key and all(not isinstance(v, (dict, list)) for v in values.values()):
            settings.setdefault(short_key(key), ", ".join(f"{block} {show(v)}" for block, v in values.items()))
    words = [f"{name}: {values}" for name, values in list(settings.items())[:6]]
    return f"Each block has its own {'; '.join(words)}." if words else ""


def usual_caption(groups: Sequence[Group]) -> str:
    """The usual values that labels leave out when they list only unusual ones."""
    words = []
    for block, usual in usual_settings(groups).items():
        values = dict.fromkeys(f"{short_key(key)}={show(value)}" for key, value in usual.items())
        words.append(f"Unless its label says otherwise, {block} has {', '.join(values)}.")
    return " ".join(words)


def validation_caption(groups: Sequence[Group], split: str) -> str:
    """How the numbers of the curves were measured, and on what the verdict rests."""
    shared = shared_settings(groups)
    tokens = shared.get("data.eval_tokens")
    text = f"the first {_number(tokens)} tokens of the validation split" if tokens else "the validation split"
    every = shared.get("trainer.val_every")
    words = [f"During training on {text}" + (f", every {_number(every)} steps" if isinstance(every, int) else "")]
    if tokens:
        words.append("at the end on all of it")
    judged = "" if split == "validation" else f" The verdict uses the {split} split."
    return "; ".join(words) + "." + judged


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else show(value)
