"""The RT-Filter: robust directional and radial estimation with a block-coordinate update (Section 3.4, Appendix C.2).

    data = simulate(RTModel(dim=16), steps=128, outlier_rate=0.2)
    estimate = RTFilter(RTModel(dim=16))(data.observations)
    error = angle_between(estimate.direction, data.states)

At every time i the filter uses all observations j <= i. It works in the stationary frame, where transport is the
identity: rotate every observation back once, estimate, rotate the estimates forward (rotate-aggregate-counter-rotate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polarlm.geometry.covariance import isotropic_variance
from polarlm.geometry.likelihood import radial_consensus, squared_chord, tangent_step
from polarlm.geometry.precision import log_kappa, log_kappa_tilde, log_rho, log_rho_tilde
from polarlm.geometry.robust import Kernel, causal_mask, estimation_weights, log_influence
from polarlm.geometry.simulation import RTModel
from polarlm.geometry.sphere import from_polar, geodesic_step, mean_resultant_length, polar_update, to_polar
from polarlm.geometry.transport import phase_tables, rotate

Start = Literal["observation", "median"]
Update = Literal["first_order", "geodesic"]
Radial = Literal["own", "shared", "joint"]


@dataclass(frozen=True)
class RTEstimate:
    """Filtered magnitude (..., T) and unit direction (..., T, D), with the weights of the last iteration."""

    magnitude: Tensor
    direction: Tensor
    directional_weights: Tensor  # A_T (..., T, T)
    radial_weights: Tensor  # A_R (..., T, T)
    log_evidence: Tensor  # log sum_j w_ij kappa_ij (..., T)
    concentration: Tensor  # mean resultant length of the transported directions (..., T)

    @property
    def states(self) -> Tensor:
        """x = m u (..., T, D)."""
        return from_polar(self.magnitude, self.direction)


@dataclass(frozen=True)
class RTFilter:
    """Estimate magnitude and direction of every latent state from the measurements up to its time.

    The defaults are the most accurate choices of docs/rt_filter.md; the paper's are kernel="student", radial="own",
    start="observation", iterations=1 (more iterations are its IRLS, one per Transformer layer).
    start: "observation" is the paper's query, the token's own measurement; "median" begins at the coordinate-wise
    median of the transported measurements, which an outlier at time i itself cannot capture.
    radial: "own" weighs magnitudes by their own residuals, "shared" reuses the directional weights (both App. C);
    "joint" multiplies own and directional influence: a measurement pointing the wrong way has c_ij near 0 and would
    drag the magnitude down, however plausible c_ij m_ij looks to the radial residual alone.
    """

    model: RTModel
    kernel: Kernel = "student_mle"
    nu_t: float = 4.0
    nu_r: float = 4.0
    tau: float = 1.0
    sigma_t0: float = 0.0
    sigma_r0: float = 0.0
    m_inf: float = 0.0
    alpha: float = 1.0
    beta: float = 1.0
    update: Update = "first_order"
    iterations: int = 8
    start: Start = "median"
    radial: Radial = "joint"

    def __post_init__(self) -> None:
        if self.update not in ("first_order", "geodesic"):
            raise ValueError(f"unknown update {self.update!r}; choose first_order or geodesic")
        if self.start not in ("observation", "median"):
            raise ValueError(f"unknown start {self.start!r}; choose observation or median")
        if self.radial not in ("own", "shared", "joint"):
            raise ValueError(f"unknown radial {self.radial!r}; choose own, shared or joint")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")

    def __call__(self, measurements: Tensor, times: Tensor | None = None) -> RTEstimate:
        """Filter measurements (..., T, D) taken at times (T,), by default 0, 1, 2, …"""
        times = default_times(measurements) if times is None else times
        cos, sin = phase_tables(times, self.model.omega.to(measurements.dtype))
        observed = rotate(self.model.latent(measurements), cos, sin, inverse=True)  # Phi^-: stationary frame
        m_hat, u_hat = to_polar(observed, radius=1.0)
        lag = (times.unsqueeze(-1) - times).clamp_min(0.0)
        carried = torch.exp(-self.model.mu * lag) * m_hat.unsqueeze(-2)  # m_ij (..., T, T)

        initial = observed if self.start == "observation" else causal_median(observed, times, self.model.mu)
        m, u = to_polar(initial, radius=1.0)
        for iteration in range(self.iterations):
            # Query noise belongs in the residual only while the query is a raw measurement.
            noisy_query = iteration == 0 and self.start == "observation"
            log_w, directional, evidence = self._directional_weights(u, u_hat, m_hat, lag, noisy_query)
            radial = directional
            if self.radial != "shared":
                radial = self._radial_weights(m, u, u_hat, carried, lag, noisy_query, log_w)
            u_bar = directional @ u_hat
            m_bar = radial_consensus(radial, u @ u_hat.transpose(-1, -2), carried)
            concentration = mean_resultant_length(u_bar)
            m, u = self._step(m, u, m_bar, u_bar)
        return RTEstimate(m, rotate(u, cos, sin), directional, radial, evidence, concentration)

    def _directional_weights(
        self, u: Tensor, u_hat: Tensor, m_hat: Tensor, lag: Tensor, noisy_query: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        noise = {
            "mu": self.model.mu,
            "eta_k2": self.model.eta_t**2,
            "sigma02": self.sigma_t0**2,
            "m_inf2": self.m_inf**2,
        }
        kappa = log_kappa(m_hat.unsqueeze(-2), lag, **noise)
        residual = kappa
        if noisy_query:
            residual = log_kappa_tilde(m_hat.unsqueeze(-2), lag, eta_q2=self.model.eta_t**2, **noise)
        distance = residual.exp() * squared_chord(u, u_hat)  # Eq. mahalanobis
        log_w = log_influence(distance, self.kernel, dim=self.model.dim / 2, nu_t=self.nu_t, tau=self.tau)
        return log_w, *estimation_weights(kappa, log_w, causal_mask(lag.shape[-1], device=lag.device))

    def _radial_weights(
        self, m: Tensor, u: Tensor, u_hat: Tensor, carried: Tensor, lag: Tensor, noisy_query: bool, log_w: Tensor
    ) -> Tensor:
        noise = {"mu": self.model.mu, "eta_k2": self.model.eta_r**2, "sigma02": self.sigma_r0**2}
        rho = log_rho(lag, **noise)
        residual = log_rho_tilde(lag, eta_q2=self.model.eta_r**2, **noise) if noisy_query else rho
        predicted = (u @ u_hat.transpose(-1, -2)) * carried  # c_ij m_ij
        distance = residual.exp() * (predicted - m.unsqueeze(-1)) ** 2
        # One degree of freedom: Student-t has exponent nu_r + 1 here (Algorithm 1 prints it without).
        influence = log_influence(distance, self.kernel, dim=1, nu_t=self.nu_r, tau=self.tau)
        if self.radial == "joint":
            influence = influence + log_w
        return estimation_weights(rho, influence, causal_mask(lag.shape[-1], device=lag.device))[0]

    def _step(self, m: Tensor, u: Tensor, m_bar: Tensor, u_bar: Tensor) -> tuple[Tensor, Tensor]:
        if self.update == "geodesic":  # the exponential map of R+ x S, component by component
            return m + self.beta * (m_bar - m), geodesic_step(u, u_bar, self.alpha)
        moved = polar_update(m, u, m_bar - m, tangent_step(u, u_bar), self.alpha, self.beta)
        return to_polar(moved, radius=1.0)


def default_times(measurements: Tensor) -> Tensor:
    """0, 1, 2, … for a sequence (..., T, D)."""
    return torch.arange(measurements.shape[-2], dtype=measurements.dtype, device=measurements.device)


def causal_median(observed: Tensor, times: Tensor, mu: float) -> Tensor:
    """Coordinate-wise median over j <= i of exp(-mu*lag) x_j, for observations in the stationary frame."""
    medians = []
    for i in range(observed.shape[-2]):
        decay = torch.exp(-mu * (times[i] - times[: i + 1])).unsqueeze(-1)
        medians.append((decay * observed[..., : i + 1, :]).median(dim=-2).values)
    return torch.stack(medians, dim=-2)


def trace_matched_eta(model: RTModel) -> float:
    """The isotropic standard deviation with the same total noise power: sqrt((eta_r^2 + (D-1) eta_t^2)/D)."""
    return math.sqrt((model.eta_r**2 + (model.dim - 1) * model.eta_t**2) / model.dim)


# Isotropic robust filtering (Appendix A): the estimator behind Robust Filter Attention, and the RT filter's baseline.
#
# One scalar variance per lag, Euclidean residuals, a precision-weighted average of transported observations:
#
#     x_bar_i = sum_j A_ij E_ij Phi(lag) x_j,   A = softmax(log P_ij + log w(P~_ij ||x_i - E_ij Phi(lag) x_j||^2))


@dataclass(frozen=True)
class IsotropicEstimate:
    """Filtered states (..., T, D) with the weights of the last iteration and their log evidence."""

    states: Tensor
    weights: Tensor
    log_evidence: Tensor


@dataclass(frozen=True)
class IsotropicFilter:
    """Euclidean filter of one isotropic noise level; kernel="gaussian" makes it plain precision weighting.

    eta: measurement noise; sigma: process noise (per square root of time); sigma0: floor. By default eta has the
    same total power as the model's radial and tangential noise together.
    """

    model: RTModel
    kernel: Kernel = "student_mle"
    nu_t: float = 4.0
    tau: float = 1.0
    eta: float | None = None
    sigma: float = 0.0
    sigma0: float = 0.0
    iterations: int = 8
    start: Start = "median"

    def __call__(self, measurements: Tensor, times: Tensor | None = None) -> IsotropicEstimate:
        """Filter measurements (..., T, D) taken at times (T,), by default 0, 1, 2, …"""
        times = default_times(measurements) if times is None else times
        cos, sin = phase_tables(times, self.model.omega.to(measurements.dtype))
        observed = rotate(self.model.latent(measurements), cos, sin, inverse=True)
        lag = (times.unsqueeze(-1) - times).clamp_min(0.0)
        decay = torch.exp(-self.model.mu * lag)
        allowed = causal_mask(lag.shape[-1], device=lag.device)
        eta2 = (trace_matched_eta(self.model) if self.eta is None else self.eta) ** 2
        variance = isotropic_variance(lag, self.model.mu, self.sigma**2, eta2, self.sigma0**2)

        x = observed if self.start == "observation" else causal_median(observed, times, self.model.mu)
        for iteration in range(self.iterations):
            noisy_query = iteration == 0 and self.start == "observation"
            residual_variance = variance + eta2 if noisy_query else variance
            distance = decayed_residual(x, observed, decay) / residual_variance
            influence = log_influence(distance, self.kernel, dim=self.model.dim / 2, nu_t=self.nu_t, tau=self.tau)
            weights, evidence = estimation_weights(-variance.log(), influence, allowed)
            x = (weights * decay) @ observed  # A_hat = A * E
        return IsotropicEstimate(rotate(x, cos, sin), weights, evidence)


def decayed_residual(queries: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """||q_i - E_ij k_j||^2 = ||q_i||^2 + E^2 ||k_j||^2 - 2 E <q_i, k_j> (..., T, S), in the stationary frame."""
    q2 = (queries * queries).sum(-1).unsqueeze(-1)
    k2 = (keys * keys).sum(-1).unsqueeze(-2)
    return (q2 + decay**2 * k2 - 2.0 * decay * (queries @ keys.transpose(-1, -2))).clamp_min(0.0)
