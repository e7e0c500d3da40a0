"""What the Triton kernels do with one tile of query-key pairs: loading, scores, weights and their gradients.

Lag tables are those of lag_tables.py, with t1 in units of log 2 and padded by PAD lags of t1 = −∞ on both sides: that
is the causal mask and the end of the sequence. Symbols as in elementwise.py; g = ∂L. A value per query or per key comes
already shaped to broadcast over the tile, so that a tile may be (queries, keys) or (keys, queries).
"""

import triton
import triton.language as tl

PAD = tl.constexpr(256)  # lags beyond both ends of a table: at least two blocks
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Matrix product in fp32; fp32 operands keep (nearly) all their bits, see triton_backend.py."""
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
def log2_1p(y):
    """log2(1+y), y ≥ 0, with what rounding 1+y lost put back."""
    one_plus = 1 + y
    return tl.log2(one_plus) + LOG2E * tl.where(y < 1, y - (one_plus - 1), 0.0)


@triton.jit
def scores(
    dots, lag, table, table_row, q2, k2, m2, q_document, k_document, shape, cap,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """n, a, b, E at each pair's lag, κ̃/d_h with and without its cap, R² before clamping, y, and (L − log n)·log2 e.

    y is x/ν or x/τ. What the switches leave out is filled with something of the right shape that nobody reads.
    """
    at = table + lag
    log2_weight = tl.load(at)
    if DOCUMENTS:
        log2_weight = tl.where(q_document == k_document, log2_weight, float("-inf"))
    free = tl.load(at + table_row)
    own, floor, n, decay = free, free, free, free
    if MAGNITUDE:
        own, floor = tl.load(at + 2 * table_row), tl.load(at + 3 * table_row)
        n = m2 * own + floor
        free = n * free
    if DECAY_KEYS or DECAY_VALUES:
        decay = tl.load(at + (4 if MAGNITUDE else 2) * table_row)
    capped = tl.minimum(free, cap)
    if DECAY_KEYS:
        r2 = q2 + decay * (decay * k2 - 2 * dots)
    else:
        r2 = q2 + k2 - 2 * dots
    y = capped * tl.maximum(r2, 0.0) * (1 / shape)
    if KERNEL == "student":
        log2_weight -= (shape + 1) * log2_1p(y)
    elif KERNEL == "exponential":
        log2_weight -= LOG2E * y
    return n, own, floor, decay, capped, free, r2, y, log2_weight


@triton.jit
def gradients(
    n, decay, capped, free, r2, y, log2_weight, d_weights, log_evidence, delta, shape, cap,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_VALUES: tl.constexpr,
):  # fmt: skip
    """The weights that multiply v, g, ∂R², −∂log κ̃ and −∂L/∂y, from the upstream gradient of the weights."""
    weights = tl.exp2(log2_weight - log_evidence * LOG2E)
    if MAGNITUDE:
        weights = n * weights
    applied = weights * decay if DECAY_VALUES else weights
    g = applied * d_weights - weights * delta
    slope = (shape + 1) / (1 + y) if KERNEL == "student" else 1.0
    d_r2 = tl.where(r2 >= 0, -g * slope * capped * (1 / shape), 0.0)
    gated = tl.where(free <= cap, g * slope * y, 0.0)
    if KERNEL == "gaussian":
        gated = g * 0.0
    return applied, g, d_r2, gated, slope
