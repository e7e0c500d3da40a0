"""The radial-tangential dynamical model, and trajectories drawn from it (Section 3.1).

x' = (-mu I + i Omega) x        contraction and rotation of D/2 complex modes, no process noise
z  = M x + noise                M = C S, the observation matrix (identity unless given)
noise = eta_r * n_r * u + eta_t * P_T(u) n_t      along the state, and in its tangent space
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polarlm.geometry.sphere import normalise, tangential_part, to_polar
from polarlm.geometry.transport import rotary_frequencies, transport

Outlier = Literal["direction", "burst", "gross"]
OUTLIERS: tuple[str, ...] = ("direction", "burst", "gross")


@dataclass(frozen=True)
class RTModel:
    """Dynamics and measurement noise: what `simulate` draws from and `RTFilter` assumes.

    eta_r and eta_t are standard deviations of the measurement along the state and per tangent dimension.
    """

    dim: int = 16
    mu: float = 0.0
    eta_r: float = 0.3
    eta_t: float = 0.05
    frequencies: Tensor | None = None  # (dim/2,); RoPE's with base 100 if None, so that every mode visibly turns
    observation: Tensor | None = None  # M = C S, an invertible (dim, dim) matrix

    def __post_init__(self) -> None:
        if self.dim % 2 or self.omega.shape != (self.dim // 2,):
            shape = "none" if self.frequencies is None else tuple(self.frequencies.shape)
            raise ValueError(f"dim must be even with dim/2 frequencies; got dim={self.dim} and frequencies {shape}")
        if min(self.eta_r, self.eta_t) <= 0 or self.mu < 0:
            raise ValueError(f"eta_r, eta_t must be > 0 and mu >= 0; got {self.eta_r}, {self.eta_t}, {self.mu}")

    @property
    def omega(self) -> Tensor:
        """Angular frequency of each complex mode (dim/2,)."""
        if self.frequencies is None:
            return rotary_frequencies(self.dim, 100.0, dtype=torch.float64)
        return self.frequencies

    def latent(self, measurements: Tensor) -> Tensor:
        """Measurements z in the eigenbasis: (C S)^{-1} z (Eq. latent_observation)."""
        if self.observation is None:
            return measurements
        return torch.linalg.solve(self.observation, measurements.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Trajectory:
    """A simulated sequence: times (T,), states and observations (..., T, D), and which are outliers (..., T)."""

    times: Tensor
    states: Tensor
    observations: Tensor
    outlier: Tensor


def simulate(
    model: RTModel,
    steps: int,
    *,
    batch: tuple[int, ...] = (),
    outlier_rate: float = 0.0,
    outlier: Outlier = "direction",
    outlier_scale: float = 5.0,
    seed: int | None = None,
) -> Trajectory:
    """Draw unit-norm initial states, let them flow for `steps` time units, and measure them at every one.

    Outliers replace the honest measurement: "direction" points anywhere with the true magnitude, "burst" has the
    magnitude times outlier_scale, "gross" is an isotropic vector outlier_scale times as long as the state.
    """
    if outlier not in OUTLIERS:
        raise ValueError(f"unknown outlier {outlier!r}; choose one of {', '.join(OUTLIERS)}")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    times = torch.arange(steps, dtype=torch.float64)
    start = normalise(normal(*batch, 1, model.dim))
    states = transport(start, times, model.omega, model.mu)  # (..., T, D)
    magnitude, direction = to_polar(states, radius=1.0)

    along = model.eta_r * normal(*batch, steps, 1) * direction
    across = model.eta_t * tangential_part(direction, normal(*batch, steps, model.dim))
    honest = states + along + across
    anywhere = magnitude.unsqueeze(-1) * normalise(normal(*batch, steps, model.dim))
    wrong = {"direction": anywhere, "burst": outlier_scale * honest, "gross": outlier_scale * anywhere}[outlier]

    is_outlier = torch.rand(*batch, steps, generator=generator) < outlier_rate
    measured = torch.where(is_outlier.unsqueeze(-1), wrong, honest)
    if model.observation is not None:
        measured = measured @ model.observation.transpose(-1, -2)
    return Trajectory(times, states, measured, is_outlier)
