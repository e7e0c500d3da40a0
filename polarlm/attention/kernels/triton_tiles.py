"""What the Triton kernels do with one tile of query-key pairs: loading, scores, weights and their gradients.

Nothing is read from tables here: on a GPU one exponential and two reciprocals per pair cost less than gathering four
numbers by lag. A value per query or per key comes already shaped to broadcast over the tile, so that a tile may be
(queries, keys) or (keys, queries). Symbols as in native/pairs.h; g = ∂L, num = m²E² + m∞²,
var = η_k²E² + σ0² + σ̃²(1−E²).
"""

import triton
import triton.language as tl

from polarlm.geometry import precision

MAX_QUERY_PRECISION = tl.constexpr(precision.MAX_QUERY_PRECISION)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# E² stops here, so that num and var keep their ratio where both floors are switched off.
MIN_DECAY2 = tl.constexpr(1e-24)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Matrix product summed in fp32."""
    if PRECISION == "interpreted":  # the interpreter would multiply the bit patterns of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_rows(base, row, stride, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a (·,Dh) matrix as a tile, zero beyond its ends."""
    channel = tl.arange(0, BLOCK_D)
    at = base + row[:, None] * stride + channel[None, :]
    if SIZE == BLOCK_D:
        return tl.load(at, mask=valid[:, None], other=0.0)
    return tl.load(at, mask=valid[:, None] & (channel < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(base, row, stride, valid, tile, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """The way back of `load_rows`."""
    channel = tl.arange(0, BLOCK_D)
    at = base + row[:, None] * stride + channel[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid[:, None] & (channel < SIZE)[None, :])


@triton.jit
def load_noise(parameters, head, heads):
    """μ·log2 e, η_k² − σ̃², σ0² + σ̃² (so that var = (η_k²−σ̃²)E² + σ0²+σ̃²), η_q², m∞², and ν or τ of a head."""
    at = parameters + head
    eta_k2, eta_q2, sigma02 = tl.load(at + heads), tl.load(at + 2 * heads), tl.load(at + 3 * heads)
    process2 = tl.load(at + 5 * heads)
    m_inf2, shape = tl.load(at + 4 * heads), tl.load(at + 6 * heads)
    return tl.load(at) * LOG2E, eta_k2 - process2, sigma02 + process2, eta_q2, m_inf2, shape


@triton.jit
def log2_1p(y):
    """log2(1+y), y ≥ 0, with what rounding 1+y lost put back."""
    one_plus = 1 + y
    return tl.log2(one_plus) + LOG2E * tl.where(y < 1, y - (one_plus - 1), 0.0)


@triton.jit
def scores(
    dots, lag, q2, k2, m2, q_document, k_document, mu, slope, floor, eta_q2, m_inf2, shape,
    SIZE: tl.constexpr, KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """E, E², num, 1/var, 1/(var + η_q²), κ̃/d_h before its cap, R² before clamping, y, and log2 of w or −∞ if not seen.

    y is x/ν or x/τ, so that w = (1+y)^{−(ν+1)} or e^{−y}.
    """
    decay = tl.exp2(-mu * tl.maximum(lag, 0.0))
    decay2 = tl.maximum(decay * decay, MIN_DECAY2)
    variance = slope * decay2 + floor
    numerator = m2 * decay2 + m_inf2 if MAGNITUDE else decay2 * 0 + 1
    inverse, inverse_query = 1 / variance, 1 / (variance + eta_q2)
    free = numerator * inverse_query * (2 / SIZE)
    r2 = q2 + decay * (decay * k2 - 2 * dots) if DECAY_KEYS else q2 + k2 - 2 * dots
    cap = MAX_QUERY_PRECISION / (SIZE / 2)
    y = tl.minimum(free, cap) * tl.maximum(r2, 0.0) * (1 / shape)
    if KERNEL == "student":
        log2_weight = -(shape + 1) * log2_1p(y)
    elif KERNEL == "exponential":
        log2_weight = -LOG2E * y
    else:
        log2_weight = y * 0
    allowed = lag >= 0
    if DOCUMENTS:
        allowed = allowed & (q_document == k_document)
    return decay, decay2, numerator, inverse, inverse_query, free, r2, y, tl.where(allowed, log2_weight, float("-inf"))


@triton.jit
def gradients(
    decay, numerator, inverse, free, r2, y, log2_weight, d_weights, log_evidence, delta, shape,
    SIZE: tl.constexpr, KERNEL: tl.constexpr, DECAY_VALUES: tl.constexpr,
):  # fmt: skip
    """The weights that multiply v, g, ∂R², −∂log κ̃ and −∂L/∂y, from the upstream gradient of the weights."""
    weights = numerator * inverse * tl.exp2(log2_weight - log_evidence * LOG2E)
    applied = weights * decay if DECAY_VALUES else weights
    g = applied * d_weights - weights * delta
    steepness = (shape + 1) / (1 + y) if KERNEL == "student" else 1.0
    cap = MAX_QUERY_PRECISION / (SIZE / 2)
    d_r2 = tl.where(r2 >= 0, -g * steepness * tl.minimum(free, cap) * (1 / shape), 0.0)
    gated = tl.where(free <= cap, g * steepness * y, 0.0)
    if KERNEL == "gaussian":
        d_r2, gated = g * 0, g * 0
    return applied, g, d_r2, gated, steepness
