"""The noise model of robust attention, per head, and the one order in which operators take its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of the noise as operators take it, (7, H); the last is the kernel's own parameter, ν or τ.
NOISE_ROWS = ("mu", "eta_k2", "eta_q2", "sigma02", "m_inf2", "process2", "shape")
RADIAL_ROWS = ("mu", "eta_k2", "eta_q2", "sigma02", "nu")  # and of the radial channel's, (5,)


@dataclass(frozen=True)
class DirectionalNoise:
    """Noise of the directional channel, one positive number per query head: shape (H,)."""

    mu: Tensor  # decay rate μ_h of magnitude and key noise, per token of lag
    eta_k2: Tensor  # key noise η²_{t,k}
    eta_q2: Tensor  # query noise η²_{t,q}
    sigma02: Tensor  # noise floor σ²_{t,0}
    m_inf2: Tensor  # information floor m²_∞; used only when a magnitude is given
    nu: Tensor | None = None  # Student-t degrees of freedom ν_t
    tau: Tensor | None = None  # temperature of the exponential kernel
    process2: Tensor | None = None  # RFA's σ̃² = σ²/2μ: adds the variance σ̃²(1−E²)

    def shape(self, kernel: str) -> Tensor:
        """The kernel's own parameter (H,): ν of Student-t, τ of exponential, 1 of gaussian, which has none."""
        shape = {"exponential": self.tau, "gaussian": torch.ones_like(self.mu)}.get(kernel, self.nu)
        assert shape is not None, "RobustCall.check sees to it"
        return shape

    def rows(self, kernel: str, dtype: torch.dtype) -> Tensor:
        """Everything as one tensor (7, H) in the order of NOISE_ROWS; no process noise is a row of zeros."""
        process2 = torch.zeros_like(self.mu) if self.process2 is None else self.process2
        named = vars(self) | {"process2": process2, "shape": self.shape(kernel)}
        return torch.stack([named[name] for name in NOISE_ROWS]).to(dtype)


@dataclass(frozen=True)
class RadialNoise:
    """Noise of the radial channel, shared by all heads: tensors of shape ()."""

    mu: Tensor
    eta_k2: Tensor
    eta_q2: Tensor
    sigma02: Tensor
    nu: Tensor

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Everything as one tensor (5,) in the order of RADIAL_ROWS."""
        return torch.stack([getattr(self, name) for name in RADIAL_ROWS]).to(dtype)
