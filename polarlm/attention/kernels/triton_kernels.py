"""Robust attention on a GPU: three Triton kernels, one pass over the keys, nothing of size N×N in memory.

    forward_kernel  a block of queries over its keys: v̄ and log-evidence, weights summed as they come
    query_kernel    a block of queries over its keys: ∂q, and the block's share of the gradient of each noise parameter
    key_kernel      a block of keys over its queries and query heads: ∂k, ∂v, ∂m²
Every sum has one owner that adds in a fixed order: no atomics, results repeat bit by bit. A query row beyond the end
gets infinite evidence, hence zero weights. Shapes as in reference.py; launched by triton_backend.py.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .triton_tiles import (
    LN2,
    MIN_DECAY2,
    SHIFT,
    gradients,
    leave_range,
    load_each,
    load_noise,
    load_rows,
    log2_1p,
    log2_kernel,
    product,
    scores,
    stop_at,
    store_rows,
    weigh,
)

PARAMETERS = tl.constexpr(7)  # μ, η_k², η_q², σ0², m∞², σ̃², and ν or τ

# A block of queries of one head: row of (B,H), the block among all, indices, positions among the keys, whether they
# exist, q, ‖q‖², documents, sums of log λ, the head's noise, and the first key that none of them sees.
Queries = namedtuple("Queries", "row batch head block blocks i at valid tile q2 document forgotten noise end")


@triton.jit
def begin(x, S: tl.constexpr):
    """The block of queries that this program owns."""
    blocks = tl.cdiv(x.queries, S.block_q)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // x.heads, row % x.heads
    i = block * S.block_q + tl.arange(0, S.block_q)
    at, valid = x.keys - x.queries + i, i < x.queries  # the queries are the last of the keys
    tile = load_rows(x.q + batch * x.q_b + head * x.q_h, i, x.q_t, valid, S)
    q2 = load_each(x.q2, row * x.queries, i, valid, 0.0, 1)
    document = load_each(x.documents, batch * x.keys, at, valid, -1, 1)
    end = tl.minimum(x.keys, x.keys - x.queries + (block + 1) * S.block_q)
    forgotten = load_each(x.forgotten, row * x.keys, at, valid, 0.0, 1)
    return Queries(
        row, batch, head, block, blocks, i, at, valid, tile, q2, document, forgotten, load_noise(x, head), end
    )


@triton.jit
def values(x, own, start, S: tl.constexpr):
    """Rows of v from `start` on."""
    j = start + tl.arange(0, S.block_k)
    return load_rows(x.v + own.batch * x.v_b + own.head // S.group * x.v_h, j, x.v_t, j < x.keys, S)


@triton.jit
def keys_at(x, own, j, exists, AXIS: tl.constexpr, S: tl.constexpr):
    """Rows, ‖k‖², m², documents and sums of log λ of keys j."""
    k_tile = load_rows(x.k + own.batch * x.k_b + own.head // S.group * x.k_h, j, x.k_t, exists, S)
    k2 = load_each(x.k2, own.row // S.group * x.keys, j, exists, 0.0, AXIS)
    m2 = load_each(x.m2, own.batch * x.keys, j, exists, 1.0, AXIS)
    document = load_each(x.documents, own.batch * x.keys, j, exists, -1, AXIS)
    return k_tile, k2, m2, document, load_each(x.forgotten, own.row * x.keys, j, exists, 0.0, AXIS)


@triton.jit
def pairs_from(x, own, start, S: tl.constexpr):
    """Keys from `start` on: their rows, ‖k‖² and m², dot products and lags with the queries, and all of the pairs."""
    j = start + tl.arange(0, S.block_k)
    k_tile, k2, m2, document, forgotten = keys_at(x, own, j, j < x.keys, 0, S)
    dots = product(own.tile, tl.trans(k_tile), S)
    lag = (own.at[:, None] - j[None, :]).to(tl.float32)
    pairs = scores(
        x, dots, lag, own.q2, k2, m2, own.document, document, own.forgotten, forgotten, own.noise, S
    )  # fmt: skip
    return k_tile, k2, m2, dots, lag, pairs


@triton.jit
def sums_leave_range(x, own, largest_m2, S: tl.constexpr):
    """Whether a row's sum may lie outside [2^LEAST, 2^MOST].

    It holds the weight of the query's own pair, and at most S times the largest κ: that of the largest magnitude at one
    end of E², in which κ is monotonic.
    """
    noise = own.noise
    k_tile, k2, m2, document, forgotten = keys_at(x, own, own.at, own.valid, 1, S)
    dots = tl.sum(own.tile.to(tl.float32) * k_tile.to(tl.float32), 1)[:, None]
    self = scores(x, dots, dots * 0, own.q2, k2, m2, document, document, forgotten, forgotten, noise, S)
    least = tl.log2(self.kappa) + log2_kernel(self.y, noise.shape, S)
    near, far = 1 / (noise.slope + noise.floor), 1 / (noise.slope * MIN_DECAY2 + noise.floor)
    if x.m2 is not None:
        largest = tl.load(largest_m2 + own.batch)
        near, far = near * (largest + noise.m_inf2), far * (largest * MIN_DECAY2 + noise.m_inf2)
    return leave_range(least, own.valid, tl.log2(x.keys * tl.maximum(near, far)))


@triton.jit
def forward_kernel(x, largest_m2, out, log_evidence, S: tl.constexpr):
    own = begin(x, S)
    shape = own.noise.shape
    # Only where sums could leave the range of fp32 is a row's largest weight found first, to sum relative to it.
    leaves = sums_leave_range(x, own, largest_m2, S)
    top = tl.full([S.block_q, 1], float("-inf"), tl.float32)
    for start in range(0, tl.where(leaves, own.end, 0), S.block_k):
        _, _, _, _, _, pairs = pairs_from(x, own, start, S)
        logits = tl.where(pairs.kappa > 0, tl.log2(pairs.kappa) + log2_kernel(pairs.y, shape, S), top)
        top = tl.maximum(top, tl.max(logits, 1)[:, None])
    log2_scale = tl.where(own.valid[:, None], tl.where(leaves, -top, SHIFT), SHIFT)

    total, acc = tl.full([S.block_q], 0.0, tl.float32), tl.full([S.block_q, S.block_d], 0.0, tl.float32)
    for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
        for start in range(0, stop_at(own.end, shape, S, SQUARES), S.block_k):
            _, _, _, _, _, pairs = pairs_from(x, own, start, S)
            weights = weigh(pairs, log2_scale, shape, S, SQUARES)
            total += tl.sum(weights, 1)
            if S.decay_values:
                weights = weights * pairs.decay
            v_tile = values(x, own, start, S)
            acc += product(weights.to(v_tile.dtype), v_tile, S)
    sums = tl.where(own.valid, total, 1.0)[:, None]
    store_rows(out + own.row * x.queries * S.size, own.i, own.valid, acc / sums, S)
    at = log_evidence + own.row * x.queries + own.i[:, None]
    tl.store(at, (tl.log2(sums) - log2_scale) * LN2, mask=own.valid[:, None])


@triton.jit
def query_kernel(x, d_out, log_evidence, delta, dq, d_parameters, S: tl.constexpr):
    own = begin(x, S)
    noise, row = own.noise, own.row * x.queries
    d_out_tile = load_rows(d_out + row * S.size, own.i, S.size, own.valid, S)
    evidence = load_each(log_evidence, row, own.i, own.valid, float("inf"), 1)
    delta_rows = load_each(delta, row, own.i, own.valid, 0.0, 1)

    acc, d_q2 = tl.full([S.block_q, S.block_d], 0.0, tl.float32), tl.full([S.block_q], 0.0, tl.float32)
    d_mu, d_eta_k2, d_eta_q2, d_floor, d_m_inf2, d_shape = d_q2, d_q2, d_q2, d_q2, d_q2, d_q2
    for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
        for start in range(0, stop_at(own.end, noise.shape, S, SQUARES), S.block_k):
            # In this order: with the other product first the compiler spills.
            k_tile, k2, m2, dots, lag, pairs = pairs_from(x, own, start, S)
            d_weights = product(d_out_tile, tl.trans(values(x, own, start, S)), S)
            applied, g, d_r2, gated, steepness = gradients(
                pairs, d_weights, evidence, delta_rows, noise.shape, S, SQUARES
            )
            if S.noise_learns:
                d_numerator = (g - gated) / pairs.numerator
                d_variance_query = gated * pairs.inverse_query
                d_variance = d_variance_query - g * pairs.inverse
                d_log_decay2 = d_variance * noise.slope * pairs.decay2
                if x.m2 is not None:
                    d_m_inf2 += tl.sum(d_numerator, 1)
                    d_log_decay2 += d_numerator * m2 * pairs.decay2
                if S.decay_values:
                    d_log_decay2 += 0.5 * applied * d_weights
                if S.decay_keys:
                    d_log_decay2 += d_r2 * pairs.decay * (pairs.decay * k2 - dots)
                d_mu -= 2 * tl.sum(lag * d_log_decay2, 1)
                d_eta_k2 += tl.sum(d_variance * pairs.decay2, 1)
                d_eta_q2 += tl.sum(d_variance_query, 1)
                d_floor += tl.sum(d_variance, 1)
            if S.shape_learns:
                by_y = g * steepness * pairs.y * (1 / noise.shape)
                d_shape += tl.sum(by_y - g * log2_1p(pairs.y) * LN2 if S.kernel == "student" else by_y, 1)
            # ∂q = 2 Σ_j ∂R²(q − E'k): both terms take the same rounded ∂R², so that what cancels still cancels in bf16.
            d_r2 = d_r2.to(k_tile.dtype)
            d_q2 += tl.sum(d_r2.to(tl.float32), 1)
            if S.decay_keys:
                d_r2 = (d_r2.to(tl.float32) * pairs.decay).to(k_tile.dtype)
            acc += product(d_r2, k_tile, S)
    store_rows(dq + row * S.size, own.i, own.valid, 2 * (d_q2[:, None] * own.tile.to(tl.float32) - acc), S)
    if S.noise_learns:
        at = d_parameters + (own.row * own.blocks + own.block) * PARAMETERS
        tl.store(at, tl.sum(d_mu, 0))
        tl.store(at + 1, tl.sum(d_eta_k2, 0))
        tl.store(at + 2, tl.sum(d_eta_q2, 0))
        tl.store(at + 3, tl.sum(d_floor, 0))
        tl.store(at + 4, tl.sum(d_m_inf2, 0))
        tl.store(at + 5, tl.sum(d_floor - d_eta_k2, 0))  # σ̃²(1−E²)
        tl.store(at + 6, tl.sum(d_shape, 0))


@triton.jit
def key_kernel(x, d_out, log_evidence, delta, dk, dv, d_m2, d_forgotten, S: tl.constexpr):
    blocks = tl.cdiv(x.keys, S.block_k)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of (B,G)
    groups = x.heads // S.group
    batch, group = row // groups, row % groups
    first = x.keys - x.queries
    j = block * S.block_k + tl.arange(0, S.block_k)
    exists = j < x.keys
    k_tile = load_rows(x.k + batch * x.k_b + group * x.k_h, j, x.k_t, exists, S)
    v_tile = load_rows(x.v + batch * x.v_b + group * x.v_h, j, x.v_t, exists, S)
    k2, m2 = load_each(x.k2, row * x.keys, j, exists, 0.0, 1), load_each(x.m2, batch * x.keys, j, exists, 1.0, 1)
    document = load_each(x.documents, batch * x.keys, j, exists, -1, 1)

    d_value, d_key = tl.full([S.block_k, S.block_d], 0.0, tl.float32), tl.full([S.block_k, S.block_d], 0.0, tl.float32)
    d_k2, d_magnitude = tl.full([S.block_k], 0.0, tl.float32), tl.full([S.block_k], 0.0, tl.float32)
    begins = tl.maximum(block * S.block_k - first, 0) // S.block_q * S.block_q
    for head in range(group * S.group, (group + 1) * S.group):
        query_row = (batch * x.heads + head) * x.queries
        noise, key_row = load_noise(x, head), (batch * x.heads + head) * x.keys
        forgotten, d_fading = load_each(x.forgotten, key_row, j, exists, 0.0, 1), tl.full([S.block_k], 0.0, tl.float32)
        for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
            for start in range(begins, stop_at(x.queries, noise.shape, S, SQUARES), S.block_q):
                i = start + tl.arange(0, S.block_q)
                valid = i < x.queries
                q_tile = load_rows(x.q + batch * x.q_b + head * x.q_h, i, x.q_t, valid, S)
                d_out_tile = load_rows(d_out + query_row * S.size, i, S.size, valid, S)
                dots = product(k_tile, tl.trans(q_tile), S)  # (keys, queries)
                d_weights = product(v_tile, tl.trans(d_out_tile), S)
                q2 = load_each(x.q2, query_row, i, valid, 0.0, 0)
                q_document = load_each(x.documents, batch * x.keys, first + i, valid, -1, 0)
                lag = ((first + i)[None, :] - j[:, None]).to(tl.float32)
                q_forgotten = load_each(x.forgotten, key_row, first + i, valid, 0.0, 0)
                pairs = scores(x, dots, lag, q2, k2, m2, q_document, document, q_forgotten, forgotten, noise, S)
                evidence = load_each(log_evidence, query_row, i, valid, float("inf"), 0)
                delta_columns = load_each(delta, query_row, i, valid, 0.0, 0)
                applied, g, d_r2, gated, _ = gradients(
                    pairs, d_weights, evidence, delta_columns, noise.shape, S, SQUARES
                )
                if x.forgotten is not None:
                    d_fading -= tl.sum(g, 1)
                d_value += product(applied.to(d_out_tile.dtype), d_out_tile, S)
                if x.m2 is not None:
                    d_magnitude += tl.sum((g - gated) / pairs.numerator * pairs.decay2, 1)
                if S.kernel != "gaussian":  # ∂k = 2 Σ_i ∂R² E'(E'k − q)
                    if S.decay_keys:
                        d_r2 = d_r2 * pairs.decay
                    d_r2 = d_r2.to(q_tile.dtype)
                    d_key += product(d_r2, q_tile, S)
                    d_k2 += tl.sum(d_r2.to(tl.float32) * pairs.decay if S.decay_keys else d_r2.to(tl.float32), 1)
        if x.forgotten is not None:
            tl.store(d_forgotten + key_row + j, d_fading, mask=exists)
    store_rows(dk + row * x.keys * S.size, j, exists, 2 * (d_k2[:, None] * k_tile.to(tl.float32) - d_key), S)
    store_rows(dv + row * x.keys * S.size, j, exists, d_value, S)
    if x.m2 is not None:
        tl.store(d_m2 + row * x.keys + j, d_magnitude, mask=exists)
