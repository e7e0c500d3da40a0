"""What the Triton kernels do with one tile of query-key pairs: loading, scores, weights and their gradients.

A value per query or per key comes already shaped to broadcast over the tile, so that a tile may be (queries, keys) or
(keys, queries). Symbols as in native/pairs.h; g = ∂L, num = m²E² + m∞², var = η_k²E² + σ0² + σ̃²(1−E²).

A tile is scored in one of two ways (docs/triton.md). EXACT takes any pair: masked ones, capped precision, weights of
any size. The other one is for tiles whose keys all precede the queries, where E² is a product of one number per query
and one per key, and no mask, cap or maximum is needed; `plain_noise` and the range of the sums say where it is used.
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
# Weights are summed as they are while all sums surely lie between 2^LEAST and 2^MOST: then they, and every weight that
# counts beside them, are normal fp32 numbers. Exponential weights are first scaled so that none exceeds 2^HIGH.
LEAST, MOST, HIGH = tl.constexpr(-80.0), tl.constexpr(100.0), tl.constexpr(60.0)

# What all kernels read: tensors (m2, documents and forgotten may be None), strides of batch, head and token, and sizes.
Inputs = namedtuple(
    "Inputs", "q k v q2 k2 m2 documents forgotten parameters q_b q_h q_t k_b k_h k_t v_b v_h v_t heads queries keys"
)
# Of one head, with C = 1/(d_h ν) or 1/(d_h τ): μ·log2 e, var = slope·E² + floor, (var + η_q²)/C = query_slope·E² +
# query_floor, η_q², m∞², ν or τ, C, and what num is multiplied with to give the least (var + η_q²)/C below the cap.
Noise = namedtuple("Noise", "mu slope floor query_slope query_floor eta_q2 m_inf2 shape scale cap")
# Of every pair: num, 1/var, C/(var + η_q²) after the cap, −∂L/∂‖R‖² and −∂L/∂log κ̃ (both over the exponent of the
# weight, ν + 1 or 1; the second is 0 at the cap), and 1/(1+y) of Student-t or y of the exponential kernel.
Pairs = namedtuple("Pairs", "numerator inverse inverse_query sharp share t")


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
    dot: bool = False  # −2 q·k instead of ‖q − k‖²
    constant: bool = False  # κ and κ̃ are the same for all pairs

    @property
    def forms(self) -> int:
        """Of Student-t's weights: by a power and, where ν stays what it is, maybe 3, by squaring."""
        return 2 if self.kernel == "student" and not self.shape_learns else 1


@triton.jit
def product(a, b, S: tl.constexpr):
    """Matrix product summed in fp32."""
    if S.precision == "interpreted":  # the interpreter would multiply the bit patterns of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=S.precision)


@triton.jit
def reciprocal(x, S: tl.constexpr):
    """1/x to 1 ulp in one instruction; a division takes eight."""
    if S.precision == "interpreted" or S.constant:
        return 1 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def power2(x, S: tl.constexpr):
    """2^x to 2 ulp in one instruction; numbers below 2^−126 are 0."""
    if S.precision == "interpreted":
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def logarithm2(x, S: tl.constexpr):
    """log2 x of a normal number, with an error of 2^−22."""
    if S.precision == "interpreted":
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_rows(base, row, stride, valid, S: tl.constexpr):
    """Rows of a (·,Dh) matrix as a tile, zero beyond its ends."""
    channel = tl.arange(0, S.block_d)[None, :]
    mask = valid[:, None] if S.size == S.block_d else valid[:, None] & (channel < S.size)
    return tl.load(base + row[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, valid, tile, S: tl.constexpr):
    """Store a tile into rows of a contiguous (·,Dh) matrix."""
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
def load_noise(x, head, S: tl.constexpr):
    """The rows of NOISE_ROWS of one head."""
    at, heads = x.parameters + head, x.heads
    process2, eta_q2, shape = tl.load(at + 5 * heads), tl.load(at + 2 * heads), tl.load(at + 6 * heads)
    slope, floor = tl.load(at + heads) - process2, tl.load(at + 3 * heads) + process2
    over_scale = shape * (S.size / 2)
    cap = over_scale * (1 / MAX_QUERY_PRECISION)
    query_slope, query_floor = slope * over_scale, (floor + eta_q2) * over_scale
    m_inf2 = tl.load(at + 4 * heads)
    return Noise(
        tl.load(at) * LOG2E, slope, floor, query_slope, query_floor, eta_q2, m_inf2, shape, 1 / over_scale, cap
    )


@triton.jit
def plain_noise(x, largest_m2, batch, noise):
    """Whether κ̃ stays below its cap and var away from 0 in all pairs: both are monotonic in E², between 1 and E²(S)."""
    far = tl.exp2(-2 * noise.mu * x.keys.to(tl.float32))
    near, remote = noise.slope + noise.floor, noise.slope * far + noise.floor
    least, most = tl.minimum(near, remote), 1.0
    if x.m2 is not None:
        most = tl.load(largest_m2 + batch) + noise.m_inf2
    return (least > 1e-20) & (most < (least + noise.eta_q2) * MAX_QUERY_PRECISION)


@triton.jit
def most_precise(x, largest_m2, batch, noise):
    """log2 of the largest κ that a pair may have: that of the largest magnitude at one end of E²."""
    near, far = 1 / (noise.slope + noise.floor), 1 / (noise.slope * MIN_DECAY2 + noise.floor)
    if x.m2 is not None:
        largest = tl.load(largest_m2 + batch)
        near, far = near * (largest + noise.m_inf2), far * (largest * MIN_DECAY2 + noise.m_inf2)
    return tl.log2(tl.maximum(near, far))


@triton.jit
def decay_between(lag, noise, S: tl.constexpr):
    """E and E² of pairs whose keys do not follow the queries; others as if the lag were 0."""
    if S.constant:
        return 1.0, 1.0
    else:
        decay = power2(-noise.mu * tl.maximum(lag, 0.0), S)
        return decay, tl.maximum(decay * decay, MIN_DECAY2)


@triton.jit
def decay_factors(distance, noise, S: tl.constexpr):
    """E and E² of a distance ≥ 0; the product of two such factors belongs to the sum of the distances."""
    if S.constant:
        return 1.0, 1.0
    else:
        return power2(-noise.mu * distance, S), power2(-2 * noise.mu * distance, S)


@triton.jit
def scores(x, dots, decay, decay2, q2, k2, m2, noise, S: tl.constexpr, EXACT: tl.constexpr):
    """From dot products to everything that all passes need of a pair."""
    variance = decay2 * noise.slope + noise.floor
    query = decay2 * noise.query_slope + noise.query_floor
    numerator = 1.0
    if x.m2 is not None:
        numerator = m2 * decay2 + noise.m_inf2
    free = query >= numerator * noise.cap
    if EXACT:
        query = tl.maximum(query, numerator * noise.cap)
    if S.dot:
        r2 = -2 * dots
    elif S.decay_keys:
        r2 = tl.maximum(q2 + decay * (decay * k2 - 2 * dots), 0.0)
    else:
        r2 = tl.maximum(q2 + k2 - 2 * dots, 0.0)
    inverse = reciprocal(variance, S)
    inverse_query = reciprocal(query, S)
    if S.kernel == "student":
        by_y = reciprocal(query + numerator * r2, S)
        t = query * by_y
        sharp, share = numerator * by_y, 1 - t
    elif S.kernel == "exponential":
        sharp = numerator * inverse_query
        t = sharp * r2
        share = t
    else:
        sharp, share, t = dots * 0, dots * 0, dots * 0
    if EXACT:
        share = tl.where(free, share, 0.0)
    return Pairs(numerator, inverse, inverse_query, sharp, share, t)


@triton.jit
def log2_robust(pairs, noise, S: tl.constexpr):
    """log2 of (1+y)^−(ν+1), e^−y or 1."""
    if S.kernel == "student":
        return (noise.shape + 1) * logarithm2(pairs.t, S)
    elif S.kernel == "exponential":
        return pairs.t * -LOG2E
    else:
        return pairs.t


@triton.jit
def by_squaring(shape):
    """Whether ν, which comes from a softplus, is 3: (1+y)^−4 is two squarings."""
    return tl.abs(shape - 3) < 2e-6


@triton.jit
def stop_at(end, shape, S: tl.constexpr, SQUARES: tl.constexpr):
    """Where a loop ends that is compiled twice, for weights by squaring and by a power: one of the two is empty."""
    if S.forms == 2:
        return tl.where(by_squaring(shape) == SQUARES, end, 0)
    else:
        return end


@triton.jit
def weigh(pairs, log2_scale, factor, noise, S: tl.constexpr, SQUARES: tl.constexpr):
    """Weights over num, times `factor` (and 2^log2_scale if they are exponential), where all pairs are seen."""
    if S.kernel == "exponential":
        robust = power2(log2_robust(pairs, noise, S) + log2_scale, S)
    elif S.kernel == "gaussian":
        return pairs.inverse * factor
    elif SQUARES:
        squared = pairs.t * pairs.t
        robust = squared * squared
    else:
        robust = power2(log2_robust(pairs, noise, S), S)
    return robust * pairs.inverse * factor


@triton.jit
def weigh_exactly(pairs, seen, log2_scale, noise, S: tl.constexpr):
    """2^log2_scale times the weights over num, 0 where a pair is not seen."""
    exponent = log2_robust(pairs, noise, S) + log2_scale
    return tl.where(seen, pairs.inverse * power2(tl.where(seen, exponent, 0.0), S), 0.0)


@triton.jit
def hide(pairs, factor, seen, S: tl.constexpr):
    """Pairs and factor of `weigh` that give 0 where a pair is not seen."""
    if S.kernel == "exponential":  # one that is not seen might weigh infinitely much
        p = pairs
        t = tl.where(seen, p.t, 1e30)
        return Pairs(p.numerator, p.inverse, p.inverse_query, p.sharp, p.share, t), factor
    else:
        return pairs, tl.where(seen, factor, 0.0)


@triton.jit
def exponent_of(noise, S: tl.constexpr):
    """ν + 1, which the derivatives of Student-t's logarithm are multiplied with."""
    return noise.shape + 1 if S.kernel == "student" else 1.0
