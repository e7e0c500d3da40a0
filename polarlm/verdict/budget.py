"""Fair budgets: what two runs may spend, whether that is equal, and the width or length that makes it equal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from polarlm.errors import UserError

# How far two budgets may be apart and still be called equal (relative).
TOLERANCE = {"parameters": 0.02, "tokens": 0.01, "FLOPs": 0.05, "seconds": 0.05}
# How close `match=` must come (relative).
MATCHED_TO = 0.005


@dataclass(frozen=True)
class Budget:
    """What a run may spend; None where it is not known."""

    parameters: float | None = None
    tokens: float | None = None
    flops: float | None = None
    seconds: float | None = None


def budget_gaps(treatment: Budget, baseline: Budget) -> dict[str, float | None]:
    """Relative differences (treatment / baseline − 1) by name; None where one of the two is unknown."""
    names = [{"flops": "FLOPs"}.get(f.name, f.name) for f in fields(Budget)]
    pairs = [(getattr(treatment, f.name), getattr(baseline, f.name)) for f in fields(Budget)]
    return {name: (a / b - 1 if a and b else None) for name, (a, b) in zip(names, pairs)}


def equal_budgets(gaps: Mapping[str, float | None]) -> list[str]:
    """The budgets that are equal within their tolerance."""
    return [name for name, gap in gaps.items() if gap is not None and abs(gap) <= TOLERANCE[name]]


def is_fair(gaps: Mapping[str, float | None]) -> bool:
    """A comparison of blocks needs equal parameters and tokens, or equal FLOPs, or equal seconds.

    What is not known at all cannot be held against a pair: runs that recorded no budget are compared with a warning.
    """
    if all(gap is None for gap in gaps.values()):
        return True
    equal = equal_budgets(gaps)
    return "FLOPs" in equal or "seconds" in equal or {"parameters", "tokens"} <= set(equal)


def describe_budgets(gaps: Mapping[str, float | None]) -> str:
    """Name which budgets are equal, which are not and by how much, and which are unknown."""
    equal = equal_budgets(gaps)
    different = [f"{n} {_percent(g)}" for n, g in gaps.items() if g is not None and n not in equal]
    unknown = [n for n, g in gaps.items() if g is None]
    listed = (("Equal", equal), ("Not equal", different), ("Unknown", unknown))
    return " ".join(f"{word}: {', '.join(names)}." for word, names in listed if names)


def unfair_reason(gaps: Mapping[str, float | None]) -> str:
    """Why a pair is not a comparison of blocks alone."""
    different = [f"{n} {_percent(g)}" for n, g in gaps.items() if g is not None and abs(g) > TOLERANCE[n]]
    return (
        f"unequal budgets ({', '.join(different)}): neither parameters and tokens, nor FLOPs, nor seconds are equal; "
        "train with match=parameters, match=flops or match=seconds"
    )


@dataclass(frozen=True)
class Match:
    """A setting that makes a budget equal to a reference: its value, what it costs, and how far that is off."""

    value: int
    cost: float
    gap: float


def match_width(
    cost: Callable[[int], float], target: float, *, what: str, multiple: int = 1, most: int = 1 << 20
) -> Match:
    """The multiple of `multiple` whose `cost(width)` (parameters or FLOPs, growing in width) is nearest to `target`.

    Raises a UserError when no width comes within 0.5 %: the block alone is too dear, or the steps are too coarse.
    """
    low, high = 1, 1
    if cost(multiple) > target * (1 + MATCHED_TO):
        raise UserError(
            f"match={what}: with a feed-forward width of only {multiple} this block has {cost(multiple):.4g} {what}, "
            f"the reference {target:.4g}; choose fewer layers, a smaller model.d_model, or another match="
        )
    while cost(high * multiple) < target and high * multiple < most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle * multiple) < target else (low, middle)
    best = min((low * multiple, high * multiple), key=lambda width: abs(cost(width) - target))
    match = Match(best, cost(best), cost(best) / target - 1)
    if abs(match.gap) > MATCHED_TO:
        raise UserError(
            f"match={what}: the nearest feed-forward width, {best}, gives {match.cost:.4g} {what} instead of "
            f"{target:.4g} ({_percent(match.gap)}, allowed are ±{100 * MATCHED_TO:g} %); "
            "widths in finer steps or a larger model would come closer"
        )
    return match


def match_steps(seconds_per_step: float, target_seconds: float) -> Match:
    """The number of steps that takes as long as the reference run."""
    steps = max(1, round(target_seconds / seconds_per_step))
    match = Match(steps, steps * seconds_per_step, steps * seconds_per_step / target_seconds - 1)
    if abs(match.gap) > MATCHED_TO:
        raise UserError(
            f"match=seconds: {steps} steps take {match.cost:.4g} s instead of {target_seconds:.4g} s "
            f"({_percent(match.gap)}); a reference run of more than {round(1 / MATCHED_TO / 2)} steps can be matched"
        )
    return match


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-", "−")
