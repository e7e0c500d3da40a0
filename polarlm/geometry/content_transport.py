"""Transport that depends on what is passed through (Appendix G.2): a product of local unitary steps instead of RoPE.

    R_s = D_s [I + (e^{i phi_s} - 1) v_s v_s^dagger]      D_s = diag(e^{i w_s}), |v_s| = 1
    Phi(i, j) = R_i R_{i-1} ... R_{j+1} = U_i U_j^dagger   U_i = R_i U_{i-1}

The steps do not commute, so the order is part of the definition: the latest stands on the left (docs/theory.md E28).
The second form means that q, k and v can be brought into a common frame one by one, x -> U^dagger x, as RoPE does it.
Vectors are real (..., D), D = 2d, in the layout of `transport`; matrices act on their d complex modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


# Prefix products of rank-one unitary steps in chunks: content transport (Appendix G.2) without a matrix per token.
#
#     H_s = I - b_s a_s a_s^dagger,  b_s = 1 - e^{i phi_s},  |a_s| = 1          W_t = H_t ... H_1 W_0
#
# Inside a chunk the product has the compact form Q_t = I - sum_{s<=t} a_s d_s^dagger. The rows d_s^dagger = b_s
# a_s^dagger Q_{s-1} solve a triangular system, (I + diag(b) strictly_lower(A^dagger A)) D^dagger = diag(b) A^dagger.
# So Q_t x_t is a causal product of two thin matrices, and only W - I at the start of every chunk is a d x d matrix.
# It is W - I that is kept: without angles everything added is exactly zero, and vectors come back bit for bit.
# Shapes: ... leading axes, T tokens in N chunks of C, d complex modes, n vectors per token that are moved together.


SHORTEST = 16  # tokens of a chunk: below this, matrices are too small to pay for their calls


def chunk_size(modes: int) -> int:
    """Tokens per chunk: a vector costs C d inside it and d^2 for what came before, so C = d balances the two."""
    return max(SHORTEST, modes)


@dataclass(frozen=True)
class UnitaryProducts:
    """W_1 ... W_T, as far as vectors can tell."""

    axes: Tensor  # (..., N, C, d) a_s
    duals: Tensor  # (..., N, C, d) d_s
    starts: Tensor  # (..., N, d, d) W - I before each chunk
    end: Tensor  # (..., d, d) W_T - I
    tokens: int

    def apply(self, x: Tensor) -> Tensor:
        """W_t x_t of complex vectors (..., n, T, d)."""
        moved = self._by_chunk(x)
        moved = moved + moved @ self.starts.mT
        moved = moved - self._causal(moved @ self.duals.mH) @ self.axes
        return self._by_vector(moved, x)

    def apply_adjoint(self, x: Tensor) -> Tensor:
        """W_t^dagger x_t of complex vectors (..., n, T, d)."""
        moved = self._by_chunk(x)
        moved = moved - self._causal(moved @ self.axes.mH) @ self.duals
        moved = moved + moved @ self.starts.conj()
        return self._by_vector(moved, x)

    def _by_chunk(self, x: Tensor) -> Tensor:
        """(..., n, T, d) -> (..., N, n C, d): all vectors of a chunk in one matrix."""
        return _chunks(x, self.axes.shape[-2]).transpose(-4, -3).flatten(-3, -2)

    def _by_vector(self, x: Tensor, like: Tensor) -> Tensor:
        """Back to (..., n, T, d)."""
        x = x.unflatten(-2, (like.shape[-3], -1)).transpose(-4, -3).flatten(-3, -2)
        return x[..., : self.tokens, :]

    def _causal(self, products: Tensor) -> Tensor:
        """Products (..., N, n C, C) of vectors with a chunk's tokens, without those that are still to come."""
        later = torch.ones(products.shape[-1], products.shape[-1], dtype=torch.bool, device=products.device).triu(1)
        return products.masked_fill(later.repeat(products.shape[-2] // products.shape[-1], 1), 0)


def unitary_products(axes: Tensor, angles: Tensor, start: Tensor | None = None) -> UnitaryProducts:
    """The products for complex unit axes (..., T, d) and real angles (..., T), going on from W_0 - I (..., d, d)."""
    tokens, modes = axes.shape[-2:]
    size = min(chunk_size(modes), max(tokens, 1))
    # 1 - e^{i phi}, with all its digits at small angles.
    factors = torch.complex(2 * (angles / 2).sin().square(), -angles.sin())
    axes, factors = _chunks(axes, size), _chunks(factors.unsqueeze(-1), size)
    lower = (factors * (axes.conj() @ axes.mT)).tril(-1)
    # The diagonal of ones is implied.
    rows = torch.linalg.solve_triangular(lower, factors * axes.conj(), upper=False, unitriangular=True)
    carried = axes.new_zeros(*axes.shape[:-3], modes, modes) if start is None else start
    starts = []
    for n in range(axes.shape[-3]):
        starts.append(carried)
        carried = carried - axes[..., n, :, :].mT @ (rows[..., n, :, :] + rows[..., n, :, :] @ carried)
    return UnitaryProducts(
        axes, rows.conj(), torch.stack(starts, -3) if starts else carried.unsqueeze(-3), carried, tokens
    )


def _chunks(x: Tensor, size: int) -> Tensor:
    """(..., T, n) -> (..., N, C, n), zeros behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % size)).unflatten(-2, (-1, size))
