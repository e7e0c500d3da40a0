"""Polar's scalars: which there are, where they start, and what a call of robust attention is given of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polarlm.attention.estimator import NOISE_SPLIT, decay_rates, matched_variance, per_head, refuse_noiseless, scalar
from polarlm.attention.robust import DirectionalNoise, RadialNoise
from polarlm.errors import UserError

CARRIED = ("prior_share", "context_power", "precision_0", "relax_a", "relax_b", "widen_q", "widen_k")
PER_HEAD = ("nu_t", "tau", *CARRIED)
PER_LAYER = ("radius", "m_inf", "m_eq", "mu_r", "nu_r", "eta_rq", "eta_rk", "sigma_r0", "alpha", "beta")
MATCHED = {"eta_tk": "k", "eta_tq": "q", "sigma_t0": "0"}  # left as None, they share the matched variance
RADIAL = ("mu_r", "nu_r", "eta_rq", "eta_rk", "sigma_r0", "beta")
PARAMETERS = (*PER_HEAD, *MATCHED, "mu", *PER_LAYER, "gain")


def initial_values(kernel: str, heads: int, size: int, mu_spread: bool, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every scalar's value, checked: (heads,) for the directional channel, () for what a layer has once."""
    values = {name: per_head(name, given[name], heads) for name in PER_HEAD}
    values |= {name: scalar(name, given[name]) for name in PER_LAYER}
    information = values["radius"].square() * (1 + values["m_inf"].square())  # of a token with m = 1, at lag 0
    total = matched_variance(kernel, size, values["nu_t"], values["tau"]) * information
    for name, share in MATCHED.items():
        value = given[name]
        values[name] = (NOISE_SPLIT[share] * total).sqrt() if value is None else per_head(name, value, heads)
    values["mu"] = decay_rates("mu", given["mu"], mu_spread, heads)
    refuse_noiseless(values, "eta_tk", "sigma_t0")
    refuse_noiseless(values, "eta_rk", "sigma_r0")
    return values


def is_bounded(values: Mapping[str, Tensor]) -> bool:
    """Whether precision stays finite at any lag: without a noise floor, decay makes it grow towards m_inf^2/0."""
    return not bool(((values["sigma_t0"] == 0) & (values["mu"] > 0) & (values["m_inf"] > 0)).any())


def check_flow(flow: str, values: Mapping[str, Tensor]) -> None:
    """Magnitudes flow to their equilibrium at the decay rates: without any they would stay."""
    if flow == "equilibrium" and not bool((values["mu"] > 0).any()) and values["mu_r"] == 0:
        raise UserError(
            "block.radial_flow=equilibrium moves magnitudes at the rates block.mu and block.mu_r, and both are 0; "
            "make one positive, or set block.radial_flow=decay."
        )


def directional_noise(parameters: Mapping[str, Tensor]) -> DirectionalNoise:
    """Variances of the directional channel from its deviations."""
    mu = parameters["mu"]
    return DirectionalNoise(
        mu=mu,
        eta_k2=parameters["eta_tk"].square(),
        eta_q2=parameters["eta_tq"].square() if "eta_tq" in parameters else torch.zeros_like(mu),
        sigma02=parameters["sigma_t0"].square(),
        m_inf2=parameters["m_inf"].square().expand_as(mu),
        nu=parameters.get("nu_t"),
        tau=parameters.get("tau"),
    )


def radial_noise(parameters: Mapping[str, Tensor], mode: str, consensus: str = "none") -> RadialNoise | None:
    """Variances of the radial channel; None without one. The gate of Appendix G.1 needs rho alone."""
    if mode == consensus == "none":
        return None
    zero = torch.zeros_like(parameters["m_inf"])
    mu = parameters.get("mu_r", zero)
    if mode != "own" and consensus != "none":
        eta_k2, sigma02 = parameters["eta_rk"].square(), parameters["sigma_r0"].square()
        return RadialNoise(mu=mu, eta_k2=eta_k2, eta_q2=zero, sigma02=sigma02, nu=zero + 1)
    if mode == "shared":
        return RadialNoise(mu=mu, eta_k2=zero, eta_q2=zero, sigma02=zero + 1, nu=zero + 1)
    return RadialNoise(
        mu=mu,
        eta_k2=parameters["eta_rk"].square(),
        eta_q2=parameters["eta_rq"].square(),
        sigma02=parameters["sigma_r0"].square(),
        nu=parameters["nu_r"],
    )
