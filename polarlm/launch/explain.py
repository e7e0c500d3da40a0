"""`polarlm explain`: what a setting means, where it acts, what it did in our results; docs/symbols.md is made of it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from polarlm.block_keys import (
    OLD,
    PARTS,
    SYMBOLS,
    current_overrides,
    part_choices,
    part_settings,
    users_of,
)
from polarlm.errors import UserError, did_you_mean
from polarlm.launch.schema import BlockSettings
from polarlm.locations import choices_of, config_folders, shipped_settings


@dataclass(frozen=True)
class Symbol:
    """One of the paper's symbols, in words."""

    letter: str
    meaning: str
    equation: str  # in TeX
    results: str  # what we found (docs/results.md)

    @property
    def short(self) -> str:
        """The first sentence of the meaning."""
        return self.meaning.partition(".")[0]


TEXTS = {
    "nu": Symbol(
        "ν",
        "degrees of freedom of the Student-t weight. Small: outliers lose weight fast. Large: softmax attention",
        r"w = (1 + s/\nu)^{-(\nu+1)}",
        "3 or 4, learned or fixed: no difference shown. Student-t instead of the exponential weight: lower by "
        "0.01–0.03 bits per byte in a search with two seeds, not shown in the ladder",
    ),
    "eta": Symbol(
        "η",
        "measurement noise of queries and keys. Larger: flatter attention. null: a fresh block has the logit range of "
        "QK-norm. Separately: queries `block.influence.eta_tq`, keys `block.precision.eta_tk`",
        r"\tilde\kappa^{-1} = \kappa^{-1} + \eta^2",
        "learned; the matched start was kept. A sharper start (`block.inputs.radius=2`) helped a little without forget "
        "gates, not with them",
    ),
    "mu": Symbol(
        "μ",
        "decay of information per token. A quarter of the heads starts at 0, the others log-spaced up to this value",
        r"E = e^{-\mu\Delta}",
        "0.001 instead of 0.01: no difference seen. Learned rates mostly move towards 0. A large μ does not replace "
        "forget gates",
    ),
    "alpha": Symbol(
        "α",
        "size of the tangential step. A fresh block's step is proportional to α, because W_o is scaled at α = 1",
        r"\Delta x = \alpha\,P_T\bar v",
        "fixed at 1 in every result",
    ),
    "beta": Symbol(
        "β",
        "size of the radial step",
        r"+\,\beta\,\Delta m\,\hat v",
        "the radial channel and evidence weights of `polar_paper` change the loss by 0.006 bits per byte, which is not "
        "shown. `polar` has no radial channel",
    ),
    "m_inf": Symbol(
        "m∞",
        "information floor: what a small or distant token still counts",
        r"\kappa = \frac{m^2E^2 + m_\infty^2(1 - E^2)}{\text{noise}}",
        "moves from 0.1 to 0.6–1.1 during training",
    ),
}
_OLD_NAMES = {"nu": "nu_t"}  # as block.frozen may name it
PART_TITLES = {
    "inputs": "queries, keys, values",
    "transport": "transport",
    "precision": "precision",
    "influence": "robust weight",
    "forgetting": "forget gates",
    "aggregate": "mean",
    "radial": "radial channel",
    "step": "step",
    "output": "output",
}


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    p = verbs.add_parser(
        "explain",
        help="explain a setting (block.nu), a part (block/influence) or a block (block=polar)",
        description="Explain a setting (block.nu), a part (block/influence) or a block (block=polar).",
    )
    p.add_argument("what", metavar="key", nargs="?", help="block.nu, block/influence, block=polar, …")
    p.add_argument("--page", action="store_true", help="print docs/symbols.md")
    p.set_defaults(run=explain)


def explain(options: argparse.Namespace) -> int:
    """Print the explanation."""
    if (options.what is None) == (not options.page):
        raise UserError(
            "explain takes one argument: a setting (block.nu), a part (block/influence) or a block (block=polar)"
        )
    print(symbols_page() if options.page else explanation(options.what), end="" if options.page else "\n")
    return 0


def explanation(what: str) -> str:
    """What a key, a part or a block is, in a few lines."""
    key, equals, value = what.partition("=")
    if key == "block" and equals:
        return _block(value)
    if key.startswith("block/"):
        return _part(key.removeprefix("block/"))
    name = key.removeprefix("block.")
    if name in TEXTS:
        return _symbol(name)
    (new,), _ = current_overrides(["block=polar", f"block.{name}=x"])[0][1:2], None
    if new.startswith("block/"):  # a switch by its old name
        return _part(new.partition("=")[0].removeprefix("block/"))
    name = new.partition("=")[0].removeprefix("block.")
    if name in TEXTS:
        return _symbol(name)
    part, _, leaf = name.partition(".")
    if part in PARTS and not leaf:
        return _part(part)
    return _setting(part, leaf) if leaf else _plain_setting(name)


def _block(name: str) -> str:
    if name not in choices_of("block"):
        raise UserError(f"block={name} does not exist. {did_you_mean(name, choices_of('block'))}")
    lines, settings = [f"block={name}: {_comment(_file('block', name))}"], shipped_settings("block", name)
    for part in PARTS if "influence" in settings else ():
        kind = settings[part]["kind"]
        lines.append(f"  {part:10} {kind:12} {_comment(_file(f'block/{part}', kind))}")
    for symbol in SYMBOLS if "influence" in settings else ():
        text, used = TEXTS[symbol], any(settings[p]["kind"] == c for p, c in users_of(symbol))
        letter = text.letter
        lines.append(
            f"  {symbol:10} {_shown(settings[symbol]):12} {letter:2} {text.short}{'' if used else ' (not used)'}"
        )
    if "influence" not in settings:
        lines += [f"  {key} = {_shown(value)}" for key, value in settings.items() if not key.startswith("_")]
    return "\n".join(lines)


def _part(part: str) -> str:
    if part not in PARTS:
        raise UserError(f"block/{part} does not exist. {did_you_mean(part, PARTS)}Parts: {', '.join(PARTS)}")
    lines = [f"block/{part}: {PART_TITLES[part]}, a part of block=polar. Choices:"]
    for choice in part_choices(part):
        keys = [key for key in part_settings(part, choice) if key != "kind"]
        lines.append(f"  {choice}: {_comment(_file(f'block/{part}', choice))}")
        if keys:
            lines.append(f"    settings: {', '.join(f'block.{part}.{key}' for key in keys)}")
    return "\n".join(lines)


def _symbol(name: str) -> str:
    text = TEXTS[name]
    return "\n".join(
        [
            f"block.{name} ({text.letter}): {text.meaning}",
            f"  equation  {text.equation}",
            f"  default   {_shown(shipped_settings('block', 'polar')[name])} (polar), "
            f"{_shown(shipped_settings('block', 'polar_paper')[name])} (polar_paper)",
            f"  allowed   {allowed(name)}",
            f"  used by   {', '.join(f'block/{part}={choice}' for part, choice in users_of(name))}",
            f"  results   {text.results}",
        ]
    )


def _setting(part: str, key: str) -> str:
    choices = [choice for choice in part_choices(part) if key in part_settings(part, choice)] if part in PARTS else []
    if not choices or key == "kind":
        known = [f"block.{p}.{k}" for p in PARTS for c in part_choices(p) for k in part_settings(p, c) if k != "kind"]
        known += [f"block.{symbol}" for symbol in SYMBOLS]
        raise UserError(f"block.{part}.{key} does not exist. {did_you_mean(f'block.{part}.{key}', known)}".strip())
    default = part_settings(part, choices[0])[key]
    return "\n".join(
        [
            f"block.{part}.{key}: {_line_comment(_file(f'block/{part}', choices[0]), key) or PART_TITLES[part]}",
            f"  default   {_shown(default)}",
            f"  allowed   {allowed(key, default)}",
            f"  used by   {', '.join(f'block/{part}={choice}' for choice in choices)}",
        ]
    )


def _plain_setting(name: str) -> str:
    """A setting of a block that is not made of parts."""
    matching = [block for block in choices_of("block") if name in shipped_settings("block", block)]
    if not matching or name.startswith("_"):
        known = [f"block.{key}" for block in choices_of("block") for key in shipped_settings("block", block)]
        raise UserError(f"block.{name} does not exist. {did_you_mean(f'block.{name}', [*known, *OLD])}".strip())
    comments = [comment for block in matching if (comment := _line_comment(_file("block", block), name))]
    return "\n".join(
        [
            f"block.{name}: {comments[0] if comments else 'a setting of these blocks'}",
            f"  default   {_shown(shipped_settings('block', matching[0])[name])} ({matching[0]})",
            f"  allowed   {allowed(name)}",
            f"  used by   {', '.join(f'block={block}' for block in matching)}",
        ]
    )


def allowed(key: str, default: Any = True) -> str:
    """The range or the words of a setting; where neither is known, the kind of its default."""
    limits = next((dict(f.metadata) for f in fields(BlockSettings) if f.name == key), {})
    if words := limits.get("choices"):
        return ", ".join(map(str, words))
    kind = "true or false" if isinstance(default, bool) else "a word" if isinstance(default, str) else "a number"
    signs = {"at_least": "from", "above": "above", "at_most": "to", "below": "below"}
    return " ".join(f"{sign} {limits[name]:g}" for name, sign in signs.items() if name in limits) or kind


def _file(group: str, name: str) -> Path:
    return next(path for folder in config_folders() if (path := folder / group / f"{name}.yaml").is_file())


def _comment(path: Path) -> str:
    """What a yaml file says about itself: the comment on top."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def _line_comment(path: Path, key: str) -> str:
    matching = re.search(rf"^{re.escape(key)}:[^#\n]*#\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return matching[1].strip() if matching else ""


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"^\$\{\.\.(\w+)\}$", r"block.\1", text)


PAGE = """# Symbols

After this page you can set every number of the polar block on the command line, and you know its effect in our
experiments.

```bash
python train.py block=polar block.nu=4 block.mu=0.02
python train.py block=polar block/influence=exponential block/radial=own block.beta=0.2
python train.py sweep=nu            # one sweep per symbol: nu, eta, mu, alpha_beta, m_inf
python -m polarlm explain block.nu  # this page, one entry at a time
```

## The six symbols of the paper

Token $i$ attends to token $j$ at lag $\\Delta$. Directions are compared by
$s_{ij} = \\tilde\\kappa_{ij}\\,\\lVert q_i - k_j \\rVert^2 / d$.

| symbol | key | meaning | equation | default | range |
|---|---|---|---|---|---|
SYMBOL_ROWS

Symbols are learned unless `block.frozen` names them. `optim.estimator_lr_factor=16` multiplies their learning rate. A
symbol that no chosen part uses is refused, with the name of the choice that would use it.

## What we found

All on Tiny Shakespeare with 0.8 M parameters ([Results](results.md), questions 2, 7 and 8).

| symbol | finding |
|---|---|
RESULT_ROWS

## Parts

`block/<part>=<choice>` exchanges a part of `block=polar`; `block.<part>.<setting>=…` changes a setting of a part.
Defaults come first.

| part | choice | what it does | settings |
|---|---|---|---|
PART_ROWS

Old flat keys (`block.nu_t=4`, `block.kernel=exponential`) still work on the command line; a note names the new key.
"""


def symbols_page() -> str:
    """docs/symbols.md."""
    polar = shipped_settings("block", "polar")
    symbols, results, parts = [], [], []
    for name, text in TEXTS.items():
        frozen = ", fixed" if {name, _OLD_NAMES.get(name, name)} & set(polar["frozen"]) else ""
        row = (text.letter, f"`block.{name}`", text.meaning, f"${text.equation}$")
        default = "matched" if polar[name] is None else _shown(polar[name]) + frozen
        symbols.append(f"| {' | '.join([*row, default, allowed(name)])} |")
        results.append(f"| {text.letter} | {text.results} |")
    for part in PARTS:
        default = polar[part]["kind"]
        for choice in [default, *(c for c in part_choices(part) if c != default)]:
            keys = [f"`{k}`" for k, v in part_settings(part, choice).items() if k != "kind" and "${..b" not in str(v)]
            about = _comment(_file(f"block/{part}", choice))
            parts.append(f"| {PART_TITLES[part]}: `{part}` | `{choice}` | {about} | {', '.join(keys)} |")
    page = PAGE.replace("SYMBOL_ROWS", "\n".join(symbols)).replace("RESULT_ROWS", "\n".join(results))
    return page.replace("PART_ROWS", "\n".join(parts))
