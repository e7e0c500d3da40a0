"""Which number decides: chosen, checked, and called by its name and unit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.errors import UserError, did_you_mean
from polarlm.evaluation.metrics import metric_of, split_metrics
from polarlm.runs.reading import Run

# Preferred first; the first that every finished run has is judged.
PREFERRED = ("test/bits_per_byte", "val/bits_per_byte", "test/loss", "val/loss")
# Differences below this do not matter, in bits per byte; other measures get what it is worth in their unit.
MARGIN = 0.005


@dataclass(frozen=True)
class Measure:
    """The judged number of a run."""

    name: str

    @property
    def key(self) -> str:
        """Its name without the split."""
        return self.name.rpartition("/")[2]

    @property
    def title(self) -> str:
        metric = metric_of(self.name)
        return metric.title if metric else self.name

    @property
    def unit(self) -> str:
        """The unit of a difference; perplexities are compared by their logarithms."""
        metric = metric_of(self.name)
        if self.is_log:
            return f"ln {self.title}"
        return metric.unit if metric else self.name

    @property
    def split(self) -> str:
        split = self.name.partition("/")[0]
        return {"val": "validation", "train": "training"}.get(split, split)

    @property
    def lower_is_better(self) -> bool:
        metric = metric_of(self.name)
        return metric is None or metric.better == "lower"

    @property
    def is_log(self) -> bool:
        """Whether its logarithm is compared."""
        metric = metric_of(self.name)
        return bool(metric and metric.is_log)

    @property
    def comparable(self) -> bool:
        """Does it mean the same for every tokenizer?"""
        metric = metric_of(self.name)
        return bool(metric and metric.comparable)

    def value(self, run: Run) -> float | None:
        """The number that is compared (the logarithm of a perplexity), or None where the run has none."""
        number = run.number(self.name)
        return math.log(number) if self.is_log and number and number > 0 else number

    def siblings(self) -> list[str]:
        """The judged name first, then bits per byte and perplexity of the same split."""
        split = self.name.partition("/")[0]
        return list(dict.fromkeys((self.name, f"{split}/bits_per_byte", f"{split}/perplexity")))


def choose_measure(runs: Sequence[Run], wanted: str | None) -> Measure:
    """The wanted number, which must be one that some run has; else the first preferred one that every run knows."""
    finished = [run for run in runs if run.status == "finished"] or list(runs)
    if wanted is not None:
        names = {name for run in runs for name in (*run.summary, *run.metrics.columns) if not name.startswith("train/")}
        offered = split_metrics(name for name in names if any(run.number(name) is not None for run in runs))
        if wanted not in offered:
            problem = "is in none of these runs" if metric_of(wanted) and "/" in wanted else "is no metric"
            raise UserError(
                f"--metric {wanted} {problem}. {did_you_mean(wanted, offered)}"
                f"These runs have: {', '.join(offered) or 'no judged number yet'}"
            )
        return Measure(wanted)

    def known(name: str) -> bool:
        return any(run.number(name) is not None for run in finished)

    def has(run: Run, name: str) -> bool:
        # A diverged run says null, which is an answer; a run without the key does not know the metric.
        return name in run.summary or run.number(name) is not None

    for name in PREFERRED:
        if known(name) and all(has(run, name) for run in finished):
            return Measure(name)
    return Measure(next((name for name in reversed(PREFERRED) if known(name)), "val/loss"))


def default_margin(measure: Measure, runs: Sequence[Run]) -> float | None:
    """0.005 bits per byte in the unit of the measure; None where that cannot be told (accuracy, unknown text size)."""
    if measure.key == "bits_per_byte":
        return MARGIN
    if not measure.lower_is_better:
        return None
    split = measure.name.partition("/")[0]
    ratios = [
        value / bits for run in runs if (value := measure.value(run)) and (bits := run.number(f"{split}/bits_per_byte"))
    ]
    # The number of digits that a person would write.
    return float(f"{MARGIN * sum(ratios) / len(ratios):.2g}") if ratios else None
