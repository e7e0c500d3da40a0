"""The example of docs/rt_filter.md: `python -m polarlm.geometry.example [picture.png]` prints its tables and draws it.

Every filter sees the same measurements and the true noise levels. Errors are means over times 8…T-1 of each
trajectory, then over independent trajectories, with the standard error of that mean.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polarlm.geometry import IsotropicFilter, RTFilter, RTModel, Trajectory, angle_between, simulate
from polarlm.geometry.robust import causal_mask
from polarlm.geometry.simulation import Outlier
from polarlm.geometry.transport import phase_tables, rotate

STEPS, BURN_IN, TRAJECTORIES, SEED = 96, 8, 400, 0
MODEL = RTModel(dim=8, mu=0.005, eta_r=0.3, eta_t=0.05)
ISOTROPIC_NOISE = RTModel(dim=8, mu=0.005, eta_r=0.1, eta_t=0.1)

SETTINGS: dict[str, tuple[RTModel, Outlier, float]] = {
    "no outliers": (MODEL, "direction", 0.0),
    "wrong way": (MODEL, "direction", 0.2),
    "gross": (MODEL, "gross", 0.2),
    "bursts": (MODEL, "burst", 0.2),
    "equal noise, wrong way": (ISOTROPIC_NOISE, "direction", 0.2),
    "equal noise, gross": (ISOTROPIC_NOISE, "gross", 0.2),
}


def filters(model: RTModel) -> dict[str, RTFilter | IsotropicFilter]:
    """The contestants, from plain to full."""
    paper: dict[str, Any] = {"kernel": "student", "radial": "own"}
    return {
        "isotropic, Gaussian": IsotropicFilter(model, kernel="gaussian"),
        "isotropic, paper's Student-t": IsotropicFilter(model, kernel="student"),
        "isotropic, Student-t": IsotropicFilter(model),
        "RT as printed, 1 step": RTFilter(model, **paper, start="observation", iterations=1),
        "RT as printed, 8 steps": RTFilter(model, **paper, start="observation"),
        "RT as printed, from the median": RTFilter(model, **paper),
        "RT with Student-t, own radial": RTFilter(model, radial="own"),
        "RT, geodesic": RTFilter(model, update="geodesic"),
        "RT (default)": RTFilter(model),
    }


def oracle(model: RTModel, data: Trajectory) -> Tensor:
    """Precision-weighted mean of the honest measurements only: what no filter can know, as a yardstick."""
    tables = phase_tables(data.times, model.omega)
    lag = (data.times[:, None] - data.times).clamp_min(0.0)
    decay = torch.exp(-model.mu * lag)
    precision = causal_mask(len(data.times)) * ~data.outlier.unsqueeze(-2) / decay**2
    mean = (precision * decay) @ rotate(data.observations, *tables, inverse=True)
    return rotate(mean / precision.sum(-1, keepdim=True).clamp_min(1e-9), *tables)


def errors(states: Tensor, data: Trajectory) -> tuple[Tensor, Tensor]:
    """Mean angle in degrees and mean relative state error of every trajectory."""
    angle = angle_between(data.states, states) * 180 / math.pi
    relative = (states - data.states).norm(dim=-1) / data.states.norm(dim=-1)
    return angle[:, BURN_IN:].mean(-1), relative[:, BURN_IN:].mean(-1)


def main(picture: str | None = None) -> None:
    """Print the two tables, filters against settings; draw the picture if a path is given."""
    angles: dict[str, list[str]] = {}
    states: dict[str, list[str]] = {}
    for model, outlier, rate in SETTINGS.values():
        data = simulate(model, STEPS, batch=(TRAJECTORIES,), outlier_rate=rate, outlier=outlier, seed=SEED)
        results = {name: errors(flt(data.observations).states, data) for name, flt in filters(model).items()}
        results["oracle: honest measurements only"] = errors(oracle(model, data), data)
        for name, (angle, relative) in results.items():
            angles.setdefault(name, []).append(_mean(angle, 2))
            states.setdefault(name, []).append(_mean(100 * relative, 1))
        gain = (results["RT (default)"][0] - results["isotropic, Student-t"][0]) / results["isotropic, Student-t"][
            0
        ].mean()
        angles.setdefault("RT (default) against isotropic Student-t, paired, %", []).append(_mean(100 * gain, 1))
    for title, table in (("Direction error, degrees", angles), ("State error, % of the state's length", states)):
        print(f"\n| {title} | {' | '.join(SETTINGS)} |\n|---{'|---' * len(SETTINGS)}|")
        for name, cells in table.items():
            print(f"| {name} | {' | '.join(cells)} |")
    if picture is not None:
        draw(Path(picture))


def draw(path: Path) -> None:
    """Left: one mode of one trajectory and its estimates. Right: error against time, mean over trajectories."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = simulate(MODEL, STEPS, batch=(TRAJECTORIES,), outlier_rate=0.2, seed=SEED)
    estimates = {
        "isotropic, Gaussian": (IsotropicFilter(MODEL, kernel="gaussian")(data.observations).states, "#c0504d"),
        "isotropic, Student-t": (IsotropicFilter(MODEL)(data.observations).states, "#e6a23c"),
        "RT filter": (RTFilter(MODEL)(data.observations).states, "#1f6feb"),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), dpi=110)
    mode, shown, half = 1, slice(4, 40), MODEL.dim // 2  # the second mode turns about twice in 40 steps

    def plane(states: Tensor) -> tuple[Tensor, Tensor]:
        return states[0, shown, mode], states[0, shown, mode + half]

    honest, wrong = data.observations.clone(), data.observations.clone()
    honest[data.outlier], wrong[~data.outlier] = float("nan"), float("nan")
    left.plot(*plane(honest), ".", color="0.6", label="measurements")
    left.plot(*plane(wrong), "x", color="0.3", markersize=5, label="outliers")
    left.plot(*plane(data.states), color="black", linewidth=2.5, label="truth")
    for name, (states, colour) in estimates.items():
        left.plot(*plane(states), color=colour, linewidth=1.2, label=name)
        angle = (angle_between(data.states, states) * 180 / math.pi).mean(0)
        right.plot(data.times, angle, color=colour, label=name)
    left.set(title="one complex mode, times 4 to 39, 20 % outliers", xlabel="real part", ylabel="imaginary part")
    left.set_aspect("equal")
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    right.set(title=f"mean over {TRAJECTORIES} trajectories", xlabel="time", ylabel="direction error, degrees")
    right.set_yscale("log")
    right.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    right.minorticks_off()
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def _mean(values: Tensor, digits: int) -> str:
    error = values.std() / math.sqrt(len(values))
    return f"{values.mean():.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    main(*sys.argv[1:2])
