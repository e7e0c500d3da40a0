"""Transport that depends on what is passed through (Appendix G.2): a product of local unitary steps instead of RoPE.

    R_s = D_s [I + (e^{i phi_s} - 1) v_s v_s^dagger]      D_s = diag(e^{i w_s}), |v_s| = 1
    Phi(i, j) = R_i R_{i-1} ... R_{j+1} = U_i U_j^dagger   U_i = R_i U_{i-1}

The steps do not commute, so the order is part of the definition: the latest stands on the left (docs/theory.md E28).
The second form means that q, k and v can be brought into a common frame one by one, x -> U^dagger x, as RoPE does it.
Vectors are real (..., D), D = 2d, in the layout of `transport`; matrices act on their d complex modes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.geometry.sphere import normalise
from polarlm.geometry.transport import to_complex, to_real


def local_step(phases: Tensor, axis: Tensor, angle: Tensor) -> Tensor:
    """R_s as complex matrices (..., d, d): phases w (..., d), axis v (..., D) of any length, angle phi (...)."""
    modes = to_complex(normalise(axis))
    turn = torch.polar(torch.ones_like(angle), angle) - 1.0
    rank_one = turn[..., None, None] * modes.unsqueeze(-1) * modes.conj().unsqueeze(-2)
    identity = torch.eye(phases.shape[-1], dtype=modes.dtype, device=modes.device)
    return torch.polar(torch.ones_like(phases), phases).unsqueeze(-1) * (identity + rank_one)


def apply_local_step(x: Tensor, phases: Tensor, axis: Tensor, angle: Tensor) -> Tensor:
    """R_s x for x (..., D), in O(d): turn the component along v by phi, then every mode by its phase."""
    modes, along = to_complex(x), to_complex(normalise(axis))
    component = (along.conj() * modes).sum(-1, keepdim=True)
    turn = torch.polar(torch.ones_like(angle), angle).unsqueeze(-1) - 1.0
    return to_real(torch.polar(torch.ones_like(phases), phases) * (modes + turn * component * along))


def cumulative_transport(steps: Tensor) -> Tensor:
    """U_i = R_i ... R_1 R_0 (T, d, d) of the steps (T, d, d); R_0 cancels in every Phi(i, j)."""
    products = [steps[0]]
    for step in steps[1:]:
        products.append(step @ products[-1])
    return torch.stack(products)


def into_common_frame(x: Tensor, frames: Tensor) -> Tensor:
    """U_i^dagger x_i: vectors (..., T, D) where all inner products are those of transported ones."""
    return to_real(torch.einsum("tba,...tb->...ta", frames.conj(), to_complex(x)))


def out_of_common_frame(x: Tensor, frames: Tensor) -> Tensor:
    """U_i x_i: back into every token's own frame, (..., T, D)."""
    return to_real(torch.einsum("tab,...tb->...ta", frames, to_complex(x)))


def aggregate_by_content(weights: Tensor, values: Tensor, frames: Tensor) -> Tensor:
    """sum_j A_ij Phi(i, j) v_j = U_i sum_j A_ij U_j^dagger v_j: weights (..., T, T), values (..., T, D)."""
    return out_of_common_frame(weights @ into_common_frame(values, frames), frames)
