"""Isotropic robust filtering (Appendix A): the estimator behind Robust Filter Attention, and the RT filter's baseline.

One scalar variance per lag, Euclidean residuals, a precision-weighted average of transported observations:

    x_bar_i = sum_j A_ij E_ij Phi(lag) x_j,   A = softmax(log P_ij + log w(P~_ij ||x_i - E_ij Phi(lag) x_j||^2))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarlm.geometry.covariance import isotropic_variance
from polarlm.geometry.robust import Kernel, causal_mask, estimation_weights, log_influence
from polarlm.geometry.rt_filter import Start, causal_median, default_times, trace_matched_eta
from polarlm.geometry.simulation import RTModel
from polarlm.geometry.transport import phase_tables, rotate


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
