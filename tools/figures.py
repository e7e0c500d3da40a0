"""The paper's figures, redrawn from polarlm.geometry: `python -m tools.figures [folder]` writes docs/figures/*.png.

They are drawn in three real dimensions, as the paper's are: a rotation about an axis stands for the complex modes.
Every function without `draw` in its name returns what a picture shows, so that a test can check it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polarlm.geometry import (
    exp_map,
    from_polar,
    mean_direction,
    normalise,
    polar_update,
    retract,
    tangential_part,
)
from polarlm.geometry.covariance import propagate, rt_covariance
from polarlm.geometry.precision import log_kappa, log_kappa_tilde
from polarlm.geometry.robust import log_influence

RADIAL, TANGENTIAL, STATE, GOLD, GREY = "#c0392b", "#2c7fb8", "#1f3d7a", "#d4a017", "0.6"
AXIS = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64)
MU = 0.08


def rotation(time: Tensor | float) -> Tensor:
    """Phi(t): the isometry that turns by t about AXIS."""
    a, b, c = (AXIS / AXIS.norm()).tolist()
    skew = torch.tensor([[0, -c, b], [c, 0, -a], [-b, a, 0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(torch.as_tensor(time, dtype=torch.float64)[..., None, None] * skew)


def noise_cloud(points: int = 300) -> dict[str, Tensor]:
    """Measurements of one state: noise along it (eta_r) and in its tangent space (eta_t)."""
    generator = torch.Generator().manual_seed(1)
    u = normalise(torch.tensor([0.5, 0.45, 0.75], dtype=torch.float64))
    covariance = rt_covariance(u, 0.18**2, 0.09**2)
    noise = torch.randn(points, 3, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(covariance).T
    return {"u": u, "points": u + noise, "radial": u + (noise - tangential_part(u.expand_as(noise), noise))}


def trajectory(steps: int = 160) -> dict[str, Tensor]:
    """x(t) = m(t) u(t): the direction turns, the magnitude decays."""
    times = torch.linspace(0, 3.6, steps, dtype=torch.float64)
    start = normalise(torch.tensor([1.0, 0.2, 0.35], dtype=torch.float64))
    direction = rotation(times) @ start
    magnitude = 1.6 * torch.exp(-MU * 3 * times)
    return {"u": direction, "x": from_polar(magnitude, direction), "m": magnitude}


def estimate(tokens: int = 24, outliers: int = 4) -> dict[str, Tensor]:
    """Transported observations, their weights w*kappa, the consensus u_bar, and the step from the last observation."""
    generator = torch.Generator().manual_seed(4)
    truth = normalise(torch.tensor([0.35, -0.55, 0.75], dtype=torch.float64))
    spread = 0.16 * torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    spread[:outliers] *= 5
    spread[-1] = torch.tensor([-0.45, -0.35, 0.2])  # the query itself is off, so that there is a step to see
    carried = normalise(truth + spread)  # already pulled forward to the query's time
    query = carried[-1]
    lag = torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
    magnitude = 0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64)
    noise: dict[str, Any] = dict(mu=MU, eta_k2=0.05, sigma02=0.02, m_inf2=0.05)
    kappa = log_kappa(magnitude, lag, **noise)
    tilde = log_kappa_tilde(magnitude, lag, eta_q2=0.05, **noise).exp()
    distance = tilde * (query - carried).square().sum(-1)
    weights = (kappa + log_influence(distance, "student", dim=1.5)).softmax(-1)
    consensus = mean_direction(weights, carried)
    step = tangential_part(query, consensus - query)
    moved = {"step": step, "ambient": query + step, "retracted": retract(query, step), "geodesic": exp_map(query, step)}
    return {"carried": carried, "weights": weights, "consensus": consensus, "query": query} | moved


def covariances(times: tuple[float, ...] = (0.0, 1.1, 2.2)) -> dict[str, Tensor]:
    """An RT covariance at u_j carried to later times: Phi Sigma Phi^T, which is the RT covariance at Phi u_j."""
    u = normalise(torch.tensor([0.9, 0.1, 0.45], dtype=torch.float64))
    phi = rotation(torch.tensor(times, dtype=torch.float64))
    return {"u": phi @ u, "sigma": propagate(rt_covariance(u, 0.2**2, 0.07**2), phi)}


def updates(alpha: float = 0.5) -> dict[str, Tensor]:
    """In the plane: the residual step by the attention output itself, and the Polar step by its tangential part."""
    m = torch.tensor(1.3, dtype=torch.float64)
    u = normalise(torch.tensor([0.25, 1.0], dtype=torch.float64))
    v_bar = torch.tensor([0.9, 0.7], dtype=torch.float64)
    polar = polar_update(m, u, torch.zeros_like(m), tangential_part(u, v_bar) / m, alpha)
    return {"x": m * u, "v_bar": v_bar, "standard": m * u + alpha * v_bar, "polar": polar}


def main(folder: str = "docs/figures") -> None:
    """Write all pictures."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("model", draw_model),
        ("filter", draw_filter),
        ("covariance", draw_covariance),
        ("update", draw_update),
    ):
        figure = draw()
        figure.savefig(out / f"{name}.png", dpi=110, metadata={"Software": None})


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _sphere(figure: Any, place: tuple[int, int, int], title: str, reach: float = 1.0) -> Any:
    """Axes with a wire sphere of radius 1; `reach` is the largest coordinate shown."""
    axes = figure.add_subplot(*place, projection="3d")
    a, b = torch.meshgrid(torch.linspace(0, torch.pi, 13), torch.linspace(0, 2 * torch.pi, 25), indexing="ij")
    axes.plot_wireframe(a.sin() * b.cos(), a.sin() * b.sin(), a.cos(), color="0.85", linewidth=0.5)
    axes.set_title(title, fontsize=11)
    limits = (-reach, reach)
    axes.set(xlim=limits, ylim=limits, zlim=limits)
    axes.set_box_aspect((1, 1, 1), zoom=1.5)
    axes.set_axis_off()
    axes.view_init(22, -50)
    return axes


def _line(axes: Any, *points: Tensor, **style: Any) -> None:
    axes.plot(*torch.stack(points).T.tolist(), **style)


def draw_model() -> Any:
    """Figure 1: the noise splits into a radial and a tangential part; the state into direction and magnitude."""
    figure, cloud, path = _figure(7, 3.6), noise_cloud(), trajectory()
    axes = _sphere(figure, (1, 2, 1), "noise along and across the state", reach=1.15)
    axes.scatter(*cloud["points"].T, s=4, color=TANGENTIAL, alpha=0.5)
    axes.scatter(*cloud["radial"].T, s=3, color=RADIAL, alpha=0.6)
    _line(axes, torch.zeros(3), cloud["u"], color=STATE, linewidth=2)
    axes = _sphere(figure, (1, 2, 2), "x(t) = m(t) u(t)", reach=1.3)
    axes.plot(*path["u"].T, color=GOLD, linewidth=2, label="direction u")
    axes.plot(*path["x"].T, color=STATE, linewidth=2, label="state x")
    for i in range(0, len(path["m"]), 20):
        _line(axes, torch.zeros(3), path["x"][i], color=GREY, linewidth=0.8)
    axes.legend(fontsize=10, loc="lower left")
    return figure


def draw_filter() -> Any:
    """Figure 2: the transported observations and their consensus; the tangent step and its retraction."""
    figure, seen = _figure(7, 3.6), estimate()
    axes = _sphere(figure, (1, 2, 1), "transported observations, by weight")
    axes.scatter(*seen["carried"].T, s=8 + 400 * seen["weights"], color=TANGENTIAL, alpha=0.7)
    _line(axes, torch.zeros(3), seen["consensus"], color=RADIAL, linewidth=2, label="consensus ū")
    axes.legend(fontsize=10, loc="lower left")
    axes = _sphere(figure, (1, 2, 2), "tangent step and retraction")
    _line(axes, torch.zeros(3), seen["query"], color=STATE, linewidth=2, label="û")
    _line(axes, seen["query"], seen["ambient"], color=TANGENTIAL, linewidth=2, label="P_T(ū − û)")
    _line(axes, seen["ambient"], seen["retracted"], color=GOLD, linewidth=2, label="retraction")
    axes.scatter(*seen["consensus"], color=RADIAL, s=20, label="ū")
    axes.legend(fontsize=10, loc="lower left")
    return figure


def draw_covariance() -> Any:
    """Figure 3: an RT covariance stays radial and tangential while it is carried along."""
    figure, carried = _figure(4.2, 3.8), covariances()
    axes = _sphere(figure, (1, 1, 1), "Σ at three times: ΦΣΦᵀ", reach=1.2)
    a, b = torch.meshgrid(torch.linspace(0, torch.pi, 15), torch.linspace(0, 2 * torch.pi, 25), indexing="ij")
    ball = torch.stack([a.sin() * b.cos(), a.sin() * b.sin(), a.cos()]).double()
    for u, sigma, shade in zip(carried["u"], carried["sigma"], (0.35, 0.55, 0.8)):
        surface = torch.einsum("ab,bij->aij", torch.linalg.cholesky(sigma), ball) * 1.5 + u[:, None, None]
        axes.plot_surface(*surface, color=TANGENTIAL, alpha=shade, linewidth=0)
        _line(axes, torch.zeros(3), u, color=GREY, linewidth=1)
    return figure


def draw_update() -> Any:
    """Figure 4: the Transformer's ambient step and the Polar Transformer's tangent step, in the plane."""
    figure, drawn = _figure(4.2, 3.8), updates()
    axes = figure.add_subplot()
    angle = torch.linspace(-0.2, torch.pi * 0.75, 100)
    radius = drawn["x"].norm()
    axes.plot(radius * angle.cos(), radius * angle.sin(), color="0.8", linewidth=1)
    for name, colour in (("x", STATE), ("v_bar", GOLD)):
        axes.annotate("", drawn[name].tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "lw": 2})
    for name, colour in (("standard", RADIAL), ("polar", TANGENTIAL)):
        axes.annotate(
            "", drawn[name].tolist(), drawn["x"].tolist(), arrowprops={"arrowstyle": "->", "color": colour, "lw": 2}
        )
        axes.annotate(name, drawn[name].tolist(), color=colour, fontsize=11)
    axes.annotate("x", drawn["x"].tolist(), color=STATE, fontsize=11)
    axes.annotate("v̄", drawn["v_bar"].tolist(), color=GOLD, fontsize=11)
    axes.set(xlim=(-0.4, 1.8), ylim=(-0.2, 1.8), aspect="equal", title="step along v̄ or along the tangent")
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:2])
