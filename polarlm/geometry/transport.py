"""Rotation transport (the paper's Phi, Eq. direction_transport): RoPE, forward, backward and pairwise.

Layout. A real vector of even size D holds D/2 complex modes in two halves: mode k is x[k] + i*x[k + D/2]
(the Llama / transformers convention, so copied weights agree).

Sign. The paper moves a state by exp(+i*w_k*lag) and brings observations into the stationary frame with exp(-i*w_k*t).
RoPE brings them there with exp(+i*w_k*t), which is `rotate`: the same model with every w_k negated. Flipping the sign
of w_k only conjugates mode k of q, k and v, and no inner product notices (test T3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.operations import operation


def rotary_frequencies(
    dim: int, base: float = 10000.0, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Angular frequency of each of the dim/2 complex modes: w_k = base^(-2k/dim), radians per token."""
    if dim % 2 or dim <= 0:
        raise ValueError(f"rotary dimension must be a positive even number (pairs are complex modes), got {dim}")
    exponent = torch.arange(0, dim, 2, device=device).to(dtype) / dim
    return 1.0 / base**exponent


def rotary_tables(
    positions: Tensor, dim: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the phase w_k*t for positions (T,) or (B, T): two tensors (..., T, dim/2)."""
    # Phases stay in fp32 or better: w*t reaches 1e3 rad, where bf16 has lost the angle altogether.
    frequencies = rotary_frequencies(dim, base, device=positions.device, dtype=dtype)
    return phase_tables(positions, frequencies)


def phase_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables for arbitrary (for example learned) frequencies of shape (dim/2,)."""
    phase = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return phase.cos(), phase.sin()


@operation
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate every mode of x (..., T, dim) by +phase, or by -phase with inverse=True; norms are unchanged.

    Tables are (T, dim/2), or (B, T, dim/2) for per-document positions: then a head axis of x is stepped over.
    The arithmetic is done in the tables' precision, the result has x's dtype.
    """
    if 2 < cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    if inverse:
        sin = -sin
    real, imag = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imag * sin, imag * cos + real * sin), dim=-1).to(x.dtype)


def rotate_aggregate_counter_rotate(weights: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Aggregate transported values: R(-t_i) sum_j A_ij R(t_j) v_j, in T + T rotations instead of T^2 (App. A)."""
    return rotate(weights @ rotate(values, cos, sin), cos, sin, inverse=True)


def transport(x: Tensor, lag: Tensor, frequencies: Tensor, mu: float | Tensor = 0.0) -> Tensor:
    """The flow over a time lag, exp(-mu*lag) Phi(lag) x with the paper's Phi(lag) = exp(+i*w*lag) (Eq. 6 and 8)."""
    cos, sin = phase_tables(lag, frequencies)
    return rotate(x, cos, sin) * torch.exp(-mu * lag).unsqueeze(-1)


def transport_pairwise(x: Tensor, positions: Tensor, frequencies: Tensor, mu: float | Tensor = 0.0) -> Tensor:
    """Every x_j (T, dim) carried to every time t_i: (T, T, dim), entry [i, j] = exp(-mu*lag) Phi(lag) x_j.

    Quadratic in T: the definition that rotate-aggregate-counter-rotate is tested against.
    """
    lag = positions.unsqueeze(-1) - positions.unsqueeze(-2)  # (T, T): t_i - t_j
    return transport(x.unsqueeze(-3), lag, frequencies, mu)


def to_complex(x: Tensor) -> Tensor:
    """The D/2 complex modes of a real vector (..., D)."""
    return torch.complex(*x.chunk(2, dim=-1))


def to_real(modes: Tensor) -> Tensor:
    """The real vector (..., D) of D/2 complex modes; inverse of `to_complex`."""
    return torch.cat((modes.real, modes.imag), dim=-1)
