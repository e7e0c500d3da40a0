"""Loss against training compute: a power law per block with bootstrap intervals, and the compute-equivalent gain.

loss = scale · FLOPs^(−exponent) is a straight line in the logarithms. It has no lower limit, so beyond the measured
range it promises too low a loss, to every block alike. The intervals resample seeds, the same ones for all blocks of a
setting; they say how far seeds decide the lines, not whether the law holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from study.judge import JudgedPart

SIZES = 3  # a line through fewer model sizes is nothing to extrapolate
DRAWS = 2000


@dataclass(frozen=True)
class Setting:
    """One rung: what every block reached at a size and horizon, seed by seed, and the FLOPs it took."""

    size: int  # parameters of the baseline
    flops: Mapping[str, float]
    losses: Mapping[str, np.ndarray]  # of the seeds that all blocks have


@dataclass(frozen=True)
class Laws:
    """The law of every block and its draws: arrays of (1 + DRAWS,), what was measured first."""

    scale: Mapping[str, np.ndarray]  # logarithm of the loss at one FLOP
    exponent: Mapping[str, np.ndarray]
    has_interval: bool  # at least two seeds everywhere

    def loss(self, block: str, flops: float) -> np.ndarray:
        """The law's loss of a block at this compute."""
        return np.exp(self.scale[block] - self.exponent[block] * np.log(flops))

    def gap(self, block: str, baseline: str, flops: float) -> np.ndarray:
        """Loss of the block minus that of the baseline, both at this compute."""
        return self.loss(block, flops) - self.loss(baseline, flops)

    def gain(self, block: str, baseline: str, flops: float) -> np.ndarray:
        """How many times this compute the baseline needs for the loss that the block has at it."""
        needed = (self.scale[baseline] - np.log(self.loss(block, flops))) / self.exponent[baseline]
        return np.exp(needed - np.log(flops))

    def interval(self, draws: np.ndarray) -> tuple[float, float] | None:
        """The middle 95 % of the draws; None with single seeds, of which nothing can be drawn."""
        if not self.has_interval:
            return None
        low, high = np.quantile(draws[1:], [0.025, 0.975])
        return float(low), float(high)


def settings_of_parts(parts: Mapping[str, JudgedPart | None], baseline: str) -> list[Setting]:
    """The rungs at which every block has a seed, smallest compute first."""
    judged = [part for part in parts.values() if part is not None]
    blocks = {line.variant for part in judged for line in part.lines}
    rungs = []
    for part in judged:
        lines = {line.variant: line for line in part.lines}
        seeds = [{seed for seed, loss in line.losses.items() if np.isfinite(loss)} for line in part.lines]
        shared = sorted(set.intersection(*seeds))
        if set(lines) != blocks or not shared:
            continue
        flops = {name: float(line.rows[0]["flops_per_token"] * line.rows[0]["tokens"]) for name, line in lines.items()}
        losses = {name: np.array([line.losses[seed] for seed in shared]) for name, line in lines.items()}
        rungs.append(Setting(int(lines[baseline].rows[0]["parameters"]), flops, losses))
    return sorted(rungs, key=lambda rung: rung.flops[baseline])


def fit_laws(rungs: Sequence[Setting], draws: int = DRAWS) -> Laws | None:
    """The laws of all blocks; None from fewer than SIZES sizes."""
    if len({rung.size for rung in rungs}) < SIZES:
        return None
    random = np.random.default_rng(0)
    measured: dict[str, list[np.ndarray]] = {name: [] for name in rungs[0].losses}
    for rung in rungs:
        seeds = len(next(iter(rung.losses.values())))
        chosen = random.integers(seeds, size=(draws, seeds))
        for name, losses in rung.losses.items():
            measured[name].append(np.log([losses.mean(), *losses[chosen].mean(axis=1)]))
    scale, exponent = {}, {}
    for name, columns in measured.items():
        logs = np.log([rung.flops[name] for rung in rungs])
        slope, scale[name] = np.polyfit(logs, np.stack(columns), 1)
        exponent[name] = -slope
    return Laws(scale, exponent, min(len(next(iter(rung.losses.values()))) for rung in rungs) > 1)
