"""What the Triton kernels do with one tile of query-key pairs: loading, scores, weights and their gradients.

Nothing is read from tables here: on a GPU one exponential and three reciprocals per pair cost less than gathering four
numbers by lag. A value per query or per key comes already shaped to broadcast over the tile, so that a tile may be
(queries, keys) or (keys, queries). Symbols as in native/pairs.h; g = ∂L, num = m²E² + m∞²,
var = η_k²E² + σ0² + σ̃²(1−E²).
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

from polarlm.geometry import precision

MAX_QUERY_PRECISION = tl.constexpr(precision.MAX_QUERY_PRECISION)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# E² stops here, so that num and var keep their ratio where both floors are switched off.
MIN_DECAY2 = tl.constexpr(1e-24)
# Weights are summed in units of 2^−SHIFT while all sums surely lie between 2^LEAST and 2^MOST: then they, and every
# weight that counts beside them, are normal fp32 numbers.
SHIFT, LEAST, MOST = tl.constexpr(64.0), tl.constexpr(-144.0), tl.constexpr(46.0)

# What all kernels read: tensors (m2, documents and forgotten may be None), strides of batch, head and token, and sizes.
Inputs = namedtuple(
    "Inputs", "q k v q2 k2 m2 documents forgotten parameters q_b q_h q_t k_b k_h k_t v_b v_h v_t heads queries keys"
)
# Of one head: μ·log2 e, η_k² − σ̃² and σ0² + σ̃² (var = slope·E² + floor), η_q², m∞², and ν or τ.
Noise = namedtuple("Noise", "mu slope floor eta_q2 m_inf2 shape")
# Of every pair: E, E², num, 1/var, 1/(var + η_q²), κ (0 if not seen), κ̃/d_h before its cap, ‖R‖² before clamping,
# y = x/ν or x/τ, and 1/(1+y).
Pairs = namedtuple("Pairs", "decay decay2 numerator inverse inverse_query kappa free r2 y inverse_y")


@dataclass(frozen=True)
class Switches:
    """What a kernel is compiled for."""

    kernel: str
    decay_keys: bool
    decay_values: bool
    precision: str  # of products: tf32 | tf32x3 | interpreted
    group: int  # query heads per key head
    size: int
    block_d: int
    block_q: int
    block_k: int
    shape_learns: bool
    noise_learns: bool = False

    @property
    def forms(self) -> int:
        """Of Student-t's weights: by a power and, where ν stays what it is, maybe 1, 3 or 7, by squaring."""
        return 2 if self.kernel == "student" and not self.shape_learns else 1


@triton.jit
def product(a, b, S: tl.constexpr):
    """Matrix product summed in fp32."""
    if S.precision == "interpreted":  # the interpreter would multiply the bit patterns of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=S.precision)


@triton.jit
def load_rows(base, row, stride, valid, S: tl.constexpr):
    """Rows of a (·,Dh) matrix as a tile, zero beyond its ends."""
    channel = tl.arange(0, S.block_d)[None, :]
    mask = valid[:, None] if S.size == S.block_d else valid[:, None] & (channel < S.size)
    return tl.load(base + row[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, valid, tile, S: tl.constexpr):
    """The way back of `load_rows`, into a contiguous matrix."""
    channel = tl.arange(0, S.block_d)[None, :]
    mask = valid[:, None] & (channel < S.size)
    tl.store(base + row[:, None] * S.size + channel, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_each(base, offset, at, valid, other, AXIS: tl.constexpr):
    """A number per token, broadcast along AXIS; `other` beyond the end, and everywhere if there is no such tensor."""
    if base is None:
        return tl.expand_dims(tl.where(valid, other, other), AXIS)
    else:
        return tl.expand_dims(tl.load(base + offset + at, mask=valid, other=other), AXIS)


@triton.jit
def load_noise(x, head):
    """The rows of NOISE_ROWS of one head."""
    at, heads = x.parameters + head, x.heads
    process2 = tl.load(at + 5 * heads)
    slope, floor = tl.load(at + heads) - process2, tl.load(at + 3 * heads) + process2
    m_inf2, shape = tl.load(at + 4 * heads), tl.load(at + 6 * heads)
    return Noise(tl.load(at) * LOG2E, slope, floor, tl.load(at + 2 * heads), m_inf2, shape)


@triton.jit
def scores(x, dots, lag, q2, k2, m2, q_document, k_document, q_forgotten, k_forgotten, noise, S: tl.constexpr):
    """From dot products to everything that both passes need of a pair."""
    decay = tl.exp2(-noise.mu * tl.maximum(lag, 0.0))
    decay2 = tl.maximum(decay * decay, MIN_DECAY2)
    variance = noise.slope * decay2 + noise.floor
    numerator = decay2 * 0 + 1 if x.m2 is None else m2 * decay2 + noise.m_inf2
    inverse, inverse_query = 1 / variance, 1 / (variance + noise.eta_q2)
    free = numerator * inverse_query * (2 / S.size)
    r2 = q2 + decay * (decay * k2 - 2 * dots) if S.decay_keys else q2 + k2 - 2 * dots
    y = tl.minimum(free, MAX_QUERY_PRECISION / (S.size / 2)) * tl.maximum(r2, 0.0) * (1 / noise.shape)
    seen = (lag >= 0) & (q_document == k_document)
    kappa = numerator * inverse
    if x.forgotten is not None:
        kappa = kappa * tl.exp2(tl.minimum(q_forgotten - k_forgotten, 0.0) * LOG2E)  # not infinite in the future
    kappa = tl.where(seen, kappa, 0.0)
    return Pairs(decay, decay2, numerator, inverse, inverse_query, kappa, free, r2, y, 1 / (1 + y))


@triton.jit
def log2_1p(y):
    """log2(1+y), y ≥ 0, with what rounding 1+y lost put back."""
    one_plus = 1 + y
    return tl.log2(one_plus) + LOG2E * tl.where(y < 1, y - (one_plus - 1), 0.0)


@triton.jit
def log2_kernel(y, shape, S: tl.constexpr):
    """log2 of (1+y)^−(ν+1), e^−y or 1."""
    if S.kernel == "student":
        return -(shape + 1) * log2_1p(y)
    else:
        return y * (-LOG2E if S.kernel == "exponential" else 0.0)


@triton.jit
def leave_range(least, valid, log2_most):
    """Whether sums may lie outside [2^LEAST, 2^MOST]: of a weight that each row holds, and of what no sum exceeds."""
    return (tl.min(tl.min(tl.where(valid[:, None], least, 0.0), 1), 0) < LEAST) | (log2_most > MOST)


@triton.jit
def power_of_two(shape):
    """The one of 2, 4, 8 that is nearest to ν+1, which comes from a softplus, and whether it is it."""
    exponent = shape + 1
    nearest = tl.where(exponent < 3, 2.0, tl.where(exponent < 6, 4.0, 8.0))
    return nearest, tl.abs(exponent - nearest) < 2e-6


@triton.jit
def stop_at(end, shape, S: tl.constexpr, SQUARES: tl.constexpr):
    """Where a loop ends that is compiled twice, for weights by squaring and by a power: one of the two is empty."""
    if S.forms == 2:
        _, squares = power_of_two(shape)
        return tl.where(squares == SQUARES, end, 0)
    else:
        return end


@triton.jit
def weigh(pairs, log2_scale, shape, S: tl.constexpr, SQUARES: tl.constexpr):
    """2^log2_scale κ w of every pair, the scale one per query; SQUARES where ν+1 is 2, 4 or 8."""
    if SQUARES:
        exponent, _ = power_of_two(shape)
        weights = pairs.inverse_y * tl.exp2(log2_scale / exponent)
        weights = weights * weights
        weights = tl.where(exponent > 3, weights * weights, weights)
        weights = tl.where(exponent > 6, weights * weights, weights)
    else:
        weights = tl.exp2(log2_scale + log2_kernel(pairs.y, shape, S))
    return tl.where(pairs.kappa > 0, pairs.kappa * weights, 0.0)  # what is not seen may weigh infinitely much


@triton.jit
def gradients(pairs, d_weights, log_evidence, delta, shape, S: tl.constexpr, SQUARES: tl.constexpr):
    """The weights that multiply v, g, ∂R², −∂log κ̃ and −∂L/∂y, from the upstream gradient of the weights."""
    weights = weigh(pairs, log_evidence * -LOG2E, shape, S, SQUARES)
    applied = weights * pairs.decay if S.decay_values else weights
    g = applied * d_weights - weights * delta
    steepness = (shape + 1) * pairs.inverse_y if S.kernel == "student" else 1.0
    cap = MAX_QUERY_PRECISION / (S.size / 2)
    d_r2 = tl.where(pairs.r2 >= 0, -g * steepness * tl.minimum(pairs.free, cap) * (1 / shape), 0.0)
    gated = tl.where(pairs.free <= cap, g * steepness * pairs.y, 0.0)
    if S.kernel == "gaussian":
        d_r2, gated = g * 0, g * 0
    return applied, g, d_r2, gated, steepness
