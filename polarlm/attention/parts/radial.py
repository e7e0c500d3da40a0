"""Step 6 of Algorithm 1: the magnitude's own robust estimate, and how the step follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polarlm.attention.estimator import choice, scalar
from polarlm.attention.parts.part import OFF, Part
from polarlm.attention.robust import RADIAL_CORRELATIONS, RadialNoise

if TYPE_CHECKING:
    from polarlm.attention.polar import PolarAttention

RADIAL = ("mu_r", "nu_r", "eta_rq", "eta_rk", "sigma_r0", "beta")
OF_GATE = {"eta_rk", "sigma_r0", "mu_r"}  # which the gate of Appendix G.1 uses as well


class Radial(Part):
    """`own`: weights of the radial likelihood; `shared`: the directional ones, averaged over the heads."""

    def __init__(
        self,
        block: PolarAttention,
        *,
        radial: str | bool,
        radial_correlation: str,
        mu_r: float,
        nu_r: float,
        eta_rq: float,
        eta_rk: float,
        sigma_r0: float,
        beta: float,
    ) -> None:
        super().__init__(block)
        # Words that YAML leaves alone; `off` and `on`, which it reads as booleans, are still understood.
        self.radial = choice("radial", radial, ("none", "own", "shared"), OFF)
        self.radial_correlation = choice("radial_correlation", radial_correlation, RADIAL_CORRELATIONS)
        self.mu_r, self.nu_r, self.beta = mu_r, nu_r, beta
        self.eta_rq, self.eta_rk, self.sigma_r0 = eta_rq, eta_rk, sigma_r0
        self.scalars = {name: scalar(name, getattr(self, name)) for name in RADIAL}
        if not self.scalars["mu_r"]:  # magnitudes that do not decay have no rate
            del self.scalars["mu_r"]
        self.mode = "off" if self.radial == "none" else self.radial  # as a call of robust attention names it
        gated = block.parts.aggregate.consensus != "none"  # by rho
        self.noisy = self.radial != "none" or gated

    def noise(self, p: Mapping[str, Tensor]) -> RadialNoise:
        """Variances of the radial channel. The gate of Appendix G.1 needs rho alone."""
        mode, gated = self.radial, self.block.parts.aggregate.consensus != "none"
        zero = torch.zeros_like(p["m_inf"])
        mu = p.get("mu_r", zero)
        if mode != "own" and gated:
            eta_k2, sigma02 = p["eta_rk"].square(), p["sigma_r0"].square()
            return RadialNoise(mu=mu, eta_k2=eta_k2, eta_q2=zero, sigma02=sigma02, nu=zero + 1)
        if mode == "shared":
            return RadialNoise(mu=mu, eta_k2=zero, eta_q2=zero, sigma02=zero + 1, nu=zero + 1)
        return RadialNoise(
            mu=mu,
            eta_k2=p["eta_rk"].square(),
            eta_q2=p["eta_rq"].square(),
            sigma02=p["sigma_r0"].square(),
            nu=p["nu_r"],
        )

    def unused(self) -> set[str]:
        """Without a channel all of it, but for what a gate uses; equal weights need no noise."""
        idle = {"none": set(RADIAL), "shared": set(RADIAL) - {"beta", "mu_r"}, "own": set()}[self.radial]
        gated = self.block.parts.aggregate.consensus != "none"
        idle = idle - OF_GATE if gated else idle
        return idle | ({"radial_correlation"} if self.radial == "none" and not gated else set())
