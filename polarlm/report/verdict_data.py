"""Data of the verdict's figures: forest plot, response curve, waterfall."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from polarlm.verdict.comparison import NOT_SHOWN, Comparison, seeds_to_decide, smallest_effect
from polarlm.verdict.evidence import ALPHA
from polarlm.verdict.groups import Group, short_key, varied_number, varied_value
from polarlm.verdict.judgement import UNEQUAL, Judged, Judgement, seed_losses

# A parameter that spans more than this is drawn on a logarithmic axis.
DECADES_FROM = 20.0


def verdict_data(groups: Sequence[Group], judgement: Judgement) -> dict[str, Any]:
    """What the figures of the verdict draw; parts that do not apply are None."""
    most = max((len(set(group.seeds)) for group in groups), default=1)
    return {
        "forest": forest_rows(judgement),
        "response": _response(groups, judgement),
        "waterfall": _waterfall(judgement),
        "margin": judgement.margin,
        "lowerIsBetter": judgement.measure.lower_is_better,
        # Half-widths of the bands are those of the table: Student's t by degrees of freedom.
        "t": [None, *(float(stats.t.isf(ALPHA / 2, df)) for df in range(1, most + 1))],
    }


def forest_rows(judgement: Judgement) -> list[dict[str, Any]] | None:
    """Difference to the baseline, interval and outcome of every group; None where there is no interval to draw."""
    rows = [_row(index, row) for index, row in enumerate(judgement.rows) if row.comparison is not None]
    return rows if any(row["low"] is not None for row in rows) else None


def _row(index: int, judged: Judged) -> dict[str, Any]:
    c = judged.comparison
    assert c is not None
    detectable = smallest_effect(c.evidence, ALPHA / c.family) if c.evidence else None
    more = None
    if judged.outcome == NOT_SHOWN and c.evidence and not any(c.diverged):
        wanted = seeds_to_decide(c)
        lacking = (wanted or 0) - c.difference.n
        said = f"+{lacking} seed{'s' * (lacking != 1)} would decide"
        more = said if wanted else "over 200 seeds to decide"
    return {
        "group": index,
        "baseline": c.baseline,
        "outcome": judged.outcome,
        "grey": judged.role == UNEQUAL,
        "n": c.difference.n,
        "detectable": detectable,
        "more": more,
        **_interval(c),
    }


def _interval(c: Comparison) -> dict[str, Any]:
    return {
        "mean": c.difference.mean if math.isfinite(c.difference.mean) else None,
        "low": c.difference.low,
        "high": c.difference.high,
        "all": c.joint_interval,
        "p": c.p_adjusted,
    }


def _response(groups: Sequence[Group], judgement: Judgement) -> dict[str, Any] | None:
    """Loss against the one number that varies."""
    key = varied_number(groups)
    if key is None:
        return None
    points: list[dict[str, Any]] = []
    for index, (group, row) in enumerate(zip(groups, judgement.rows)):
        value = varied_value(group, key)
        estimate = row.estimates[judgement.measure.name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not estimate.n:
            continue
        seeds = [v for v in seed_losses(group, judgement.measure).values() if math.isfinite(v)]
        shown = [math.exp(v) for v in seeds] if judgement.measure.is_log else seeds
        ends = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
        points.append({"group": index, "x": value, "seeds": shown, "baseline": row.role == "baseline", **ends})
    values = [point["x"] for point in points]
    if len(set(values)) < 3:
        return None
    log = min(values) > 0 and max(values) / min(values) >= DECADES_FROM
    is_size = key == "model.d_model"
    fits = _fits(groups, points) if is_size and judgement.measure.lower_is_better else []
    return {"key": key, "name": short_key(key), "log": log or is_size, "points": points, "fits": fits}


def _fits(groups: Sequence[Group], points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss = a + b log2(width) over all seeds of each block: b is what a doubling of the width brings."""
    fits = []
    for block in dict.fromkeys(groups[point["group"]].block for point in points):
        of_block = [point for point in points if groups[point["group"]].block == block]
        doublings = [math.log2(point["x"]) for point in of_block for _ in point["seeds"]]
        losses = [seed for point in of_block for seed in point["seeds"]]
        x = sorted({point["x"] for point in of_block})
        if len(x) >= 3:
            slope, start = np.polyfit(doublings, losses, 1)
            line = [float(start + slope * math.log2(value)) for value in x]
            fits.append({"group": of_block[0]["group"], "block": block, "x": x, "y": line, "perDoubling": float(slope)})
    return fits


def _waterfall(judgement: Judgement) -> list[dict[str, Any]] | None:
    """Every step of a ladder with the level it starts from."""
    steps = []
    for step in judgement.steps:
        level = judgement.rows[step.before].estimates[judgement.measure.name]
        steps.append(
            {
                "group": step.group,
                "before": step.before,
                "level": level.mean if level.n else None,
                "outcome": step.comparison.outcome,
                **_interval(step.comparison),
            }
        )
    return steps or None
