"""How often the verdict is wrong, on made-up seeds whose truth is known; writes its tables into docs/statistics.md.

python -m benchmarks.error_rates            8,000 repetitions per row, about five minutes of one core
python -m benchmarks.error_rates --quick    1,000, to look
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polarlm.verdict.comparison import (
    EQUIVALENT,
    NOT_SHOWN,
    Comparison,
    adjust,
    compare_seeds,
    equivalence_power,
    power,
    smallest_effect,
)
from polarlm.verdict.evidence import Evidence, evidence_of_mean
from polarlm.verdict.per_document import compare_documents, compare_seeds_and_documents

PAGE = Path(__file__).resolve().parents[1] / "docs" / "statistics.md"
SPREAD = 0.01  # of a seed's loss, in bits per byte
NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails (t, 4 degrees)": lambda rng, shape: rng.standard_t(4, size=shape) / np.sqrt(2),
    "skewed (exponential)": lambda rng, shape: rng.exponential(size=shape) - 1,
}
Table = tuple[list[str], list[list[str]]]


def draw(
    rng: np.random.Generator, n: int, effect: float, correlation: float, noise: str = "normal"
) -> tuple[dict, dict]:
    """Losses of n paired seeds of two settings: a shared part (what pairing removes) and a part of their own."""
    shared, a, b = NOISES[noise](rng, (3, n))
    mix = lambda own: 2 + SPREAD * (np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own)  # noqa: E731
    return dict(enumerate(mix(a) + effect)), dict(enumerate(mix(b)))


def one_comparison(n: int, correlation: float, repetitions: int, noise: str = "normal") -> dict[str, float]:
    """False positives of both tests, coverage, and contradictions of interval and test, for n paired seeds."""
    rng = np.random.default_rng([n, round(10 * correlation), list(NOISES).index(noise)])
    outcomes: dict[str, list[bool]] = {"paired": [], "unpaired": [], "covered": [], "contradiction": []}
    for _ in range(repetitions):
        ours, theirs = draw(rng, n, 0.0, correlation, noise)
        c = compare_seeds("a", ours, "b", theirs)
        low, high = c.difference.low, c.difference.high
        assert low is not None and high is not None and c.p_unpaired is not None
        outcomes["paired"].append(c.outcome != NOT_SHOWN)
        outcomes["unpaired"].append(c.p_unpaired < 0.05)
        outcomes["covered"].append(low <= 0 <= high)
        outcomes["contradiction"].append((c.outcome != NOT_SHOWN) == (low <= 0 <= high))
    return {name: float(np.mean(values)) for name, values in outcomes.items()}


def looking_after_every_seed(effect: float, repetitions: int, first: int = 2, last: int = 10) -> dict[str, float]:
    """Stop at the first verdict: how often, and after how many seeds, with the fixed and with the always-valid rule."""
    rng = np.random.default_rng(7)
    stopped: dict[bool, list[int]] = {False: [], True: []}
    for _ in range(repetitions):
        differences = rng.normal(effect, SPREAD, last)
        for always_valid, ends in stopped.items():
            looks = (evidence_of_mean(differences[:n], always_valid) for n in range(first, last + 1))
            ends.append(next((first + i for i, e in enumerate(looks) if e and e.p_value() < 0.05), 0))
    return {
        "fixed": float(np.mean(np.array(stopped[False]) > 0)),
        "always valid": float(np.mean(np.array(stopped[True]) > 0)),
        "seeds": float(np.mean([n or last for n in stopped[True]])),
    }


def shown_power(n: int, repetitions: int) -> dict[str, float]:
    """Predicted and measured power at the effect that n seeds should show four times out of five, and at half of it."""
    rng = np.random.default_rng(n)
    error = SPREAD / np.sqrt(n)
    effect = smallest_effect(Evidence(0.0, error, n - 1, n)) or np.nan
    rates = []
    for size in (effect, effect / 2):
        samples = rng.normal(size, SPREAD, (repetitions, n))
        evidence = [evidence_of_mean(sample) for sample in samples]
        rates.append(np.mean([e is not None and e.p_value() < 0.05 for e in evidence]))
    return {
        "effect": effect,
        "predicted": power(effect, error, n - 1),
        "measured": float(rates[0]),
        "predicted at half": power(effect / 2, error, n - 1),
        "measured at half": float(rates[1]),
    }


def equivalence(n: int, repetitions: int, margin: float = 0.005) -> dict[str, float]:
    """How often a difference as large as the margin is called equivalent, and how often one of zero is."""
    rng, spread = np.random.default_rng(n), 0.004
    rates = []
    for effect in (margin, 0.0):
        outcomes = []
        for _ in range(repetitions):
            differences = rng.normal(effect, spread, n)
            comparison = compare_seeds(
                "a", dict(enumerate(differences)), "b", dict.fromkeys(range(n), 0.0), margin=margin
            )
            outcomes.append(comparison.is_equivalent)
        rates.append(float(np.mean(outcomes)))
    predicted = equivalence_power(0.0, margin, spread / np.sqrt(n), n - 1)
    return {"false": rates[0], "shown": rates[1], "predicted": predicted}


def family(effects: tuple[float, ...], n: int, repetitions: int) -> dict[str, float]:
    """Several settings against one baseline: false claims anywhere, and whether all intervals hold at once."""
    rng = np.random.default_rng(len(effects))
    wrong, covered = [], []
    for _ in range(repetitions):
        base = rng.normal(2, SPREAD, n)
        comparisons: list[Comparison] = []
        for effect in effects:
            ours = base * 0 + 2 + effect + rng.normal(0, SPREAD, n)
            comparisons.append(compare_seeds("a", dict(enumerate(ours)), "b", dict(enumerate(base))))
        judged = adjust(comparisons)
        wrong.append(any(e == 0 and c.outcome not in (NOT_SHOWN, EQUIVALENT) for e, c in zip(effects, judged)))
        ends = [c.simultaneous or (0.0, 0.0) for c in judged]
        # A decided comparison excludes zero: its interval is open there.
        covered.append(all(low < e < high for e, (low, high) in zip(effects, ends)))
    return {"wrong": float(np.mean(wrong)), "covered": float(np.mean(covered))}


def documents(seeds: int, count: int, repetitions: int) -> dict[str, float]:
    """Coverage of the two-level interval, of seeds alone, and of the document bootstrap for one pair of checkpoints."""
    rng, truth = np.random.default_rng(seeds), -0.005
    both, alone, bootstrap = [], [], []
    for index in range(repetitions):
        sizes = rng.integers(200, 3000, count).astype(float)
        by_document = truth + 0.03 * rng.normal(size=count)
        by_seed = SPREAD / 2 * rng.normal(size=(seeds, 1))
        differences = sizes * (by_document + by_seed + 0.03 * rng.normal(size=(seeds, count)))
        low, high = compare_seeds_and_documents(differences, np.zeros_like(differences), sizes).interval()
        both.append(low <= truth <= high)
        seeds_only = evidence_of_mean(differences.sum(axis=1) / sizes.sum())
        assert seeds_only is not None
        low, high = seeds_only.interval()
        alone.append(low <= truth <= high)
        if index < repetitions // 20:  # a bootstrap is slow
            one = compare_documents(differences[0], np.zeros(count), sizes)
            bootstrap.append((one.low or 0.0) <= truth + float(by_seed[0, 0]) <= (one.high or 0.0))
    return {"both": float(np.mean(both)), "seeds alone": float(np.mean(alone)), "bootstrap": float(np.mean(bootstrap))}


def percent(rate: float) -> str:
    """5.02 %."""
    return f"{100 * rate:.1f} %"


def tables(repetitions: int) -> dict[str, Table]:
    """Every table of the page, by the name of its place."""
    filled: dict[str, Table] = {}
    rows = []
    for n in (3, 5, 8, 12):
        for correlation in (0.0, 0.8):
            r = one_comparison(n, correlation, repetitions // (4 if n >= 6 else 1))
            rates = [percent(r[k]) for k in ("paired", "unpaired", "covered", "contradiction")]
            rows.append([str(n), f"{correlation:g}", *rates])
    head = [
        "seeds",
        "correlation of pairs",
        "false positives",
        "unpaired test alone",
        "coverage of 95 %",
        "contradictions",
    ]
    filled["one"] = (head, rows)
    rows = []
    for noise in list(NOISES)[1:]:
        for n in (3, 5, 8):
            r = one_comparison(n, 0.0, repetitions // (4 if n >= 6 else 1), noise)
            rows.append([noise, str(n), percent(r["paired"]), percent(r["covered"])])
    filled["noise"] = (["noise of a seed", "seeds", "false positives", "coverage of 95 %"], rows)
    rows = []
    for effect in (0.0, 1.0, 2.0, 3.0):
        r = looking_after_every_seed(effect * SPREAD, repetitions)
        rows.append([f"{effect:g} spreads", percent(r["fixed"]), percent(r["always valid"]), f"{r['seeds']:.1f}"])
    filled["looks"] = (
        ["true difference", "fixed rule claims one", "always-valid rule claims one", "after seeds (mean)"],
        rows,
    )
    rows = []
    for n in (3, 5, 8, 12):
        r = shown_power(n, repetitions)
        rates = [percent(r[k]) for k in ("predicted", "measured", "predicted at half", "measured at half")]
        rows.append([str(n), f"{r['effect'] / SPREAD:.2f} spreads", *rates])
    filled["power"] = (
        ["seeds", "smallest effect", "power predicted", "measured", "at half of it predicted", "measured"],
        rows,
    )
    rows = []
    for n in (3, 5, 8):
        r = equivalence(n, repetitions // (4 if n >= 6 else 1))
        rows.append([str(n), percent(r["false"]), percent(r["shown"]), percent(r["predicted"])])
    filled["equivalence"] = (["seeds", "claimed at a difference of the margin", "claimed at none", "predicted"], rows)
    rows = []
    for words, effects in (
        ("four without a difference", (0.0,) * 4),
        ("two of four differ by 4 spreads", (0.0, 0.0, 0.04, 0.04)),
        ("three of four differ by 8 spreads", (0.0, 0.08, 0.08, 0.08)),
        ("all four differ by 8 spreads", (0.08,) * 4),
    ):
        r = family(effects, 5, repetitions // 2)
        rows.append([words, percent(r["wrong"]) if 0.0 in effects else "—", percent(r["covered"])])
    filled["family"] = (
        ["comparisons on the page (5 seeds)", "any false claim", "all simultaneous intervals hold"],
        rows,
    )
    rows = []
    for seeds, count in ((3, 30), (3, 300), (8, 100)):
        r = documents(seeds, count, repetitions // 4)
        rows.append([f"{seeds} × {count}", percent(r["both"]), percent(r["seeds alone"]), percent(r["bootstrap"])])
    filled["documents"] = (["seeds × documents", "two levels", "seeds alone", "document bootstrap, one pair"], rows)
    return filled


def markdown(table: Table) -> str:
    """A table as Markdown."""
    head, rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repetitions = 1_000 if parser.parse_args().quick else 8_000
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables(repetitions).items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        if not place.search(page):
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
        text = markdown(table)
        page = place.sub(rf"\g<1>{text}\n\g<2>", page)
        print(f"{name}\n{text}\n", flush=True)
    page = re.sub(r"[\d,]+ repetitions per row", f"{repetitions:,} repetitions per row", page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
