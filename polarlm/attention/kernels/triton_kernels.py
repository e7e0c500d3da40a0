"""Robust attention on a GPU: three Triton kernels, one pass over the keys, nothing of size N×N in memory.

    forward_kernel  a block of queries over its keys: v̄ and log-evidence by online soft-max
    query_kernel    a block of queries over its keys: ∂q, and the block's share of the gradient of each noise parameter
    key_kernel      a block of keys over its queries and query heads: ∂k, ∂v, ∂m²
Every sum has one owner that adds in a fixed order: no atomics, results repeat bit by bit. A query row beyond the end
gets infinite evidence, hence zero weights. Shapes as in reference.py; launched by triton_backend.py.
"""

import triton
import triton.language as tl

from .triton_tiles import LN2, gradients, load_noise, load_rows, log2_1p, product, scores, store_rows

PARAMETERS = tl.constexpr(7)  # μ, η_k², η_q², σ0², m∞², σ̃², and ν or τ


@triton.jit
def forward_kernel(
    q, k, v, q2, k2, m2, documents, parameters, out, log_evidence,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, BLOCK_Q)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of (B,H)
    batch, head = row // heads, row % heads
    first = keys - queries  # position of the first query
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = i < queries
    q_tile = load_rows(q + batch * q_b + head * q_h, i, q_t, valid, SIZE, BLOCK_D)
    q2_rows = tl.load(q2 + row * queries + i, mask=valid, other=0.0)[:, None]
    k += batch * k_b + head // GROUP * k_h
    v += batch * v_b + head // GROUP * v_h
    k2 += row // GROUP * keys
    mu, slope, floor, eta_q2, m_inf2, shape = load_noise(parameters, head, heads)
    position = (first + i).to(tl.float32)[:, None]
    q_document = q2_rows
    if DOCUMENTS:
        q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[:, None]

    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    safe_top, total = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, tl.minimum(keys, first + (block + 1) * BLOCK_Q), BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        exists = j < keys
        k_tile = load_rows(k, j, k_t, exists, SIZE, BLOCK_D)
        k2_columns = tl.load(k2 + j, mask=exists, other=0.0)[None, :]
        k_document, m2_columns = k2_columns, k2_columns
        if MAGNITUDE:
            m2_columns = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[None, :]
        if DOCUMENTS:
            k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[None, :]
        dots = product(q_tile, tl.trans(k_tile), PRECISION)
        decay, _, numerator, inverse, _, _, _, _, log2_weight = scores(
            dots, position - j.to(tl.float32)[None, :], q2_rows, k2_columns, m2_columns, q_document, k_document,
            mu, slope, floor, eta_q2, m_inf2, shape, SIZE, KERNEL, MAGNITUDE, DECAY_KEYS, DOCUMENTS,
        )  # fmt: skip
        # The maximum is taken without κ, whose range is small against that of fp32.
        new_top = tl.maximum(top, tl.max(log2_weight, 1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing of the row's document seen yet
        weights = numerator * inverse * tl.exp2(log2_weight - safe_top[:, None])
        rescale = tl.exp2(top - safe_top)
        total = total * rescale + tl.sum(weights, 1)
        if DECAY_VALUES:
            weights = weights * decay
        v_tile = load_rows(v, j, v_t, exists, SIZE, BLOCK_D)
        acc = acc * rescale[:, None] + product(weights.to(v_tile.dtype), v_tile, PRECISION)
        top = new_top
    total = tl.where(valid, total, 1.0)
    store_rows(out + row * queries * SIZE, i, SIZE, valid, acc / total[:, None], SIZE, BLOCK_D)
    tl.store(log_evidence + row * queries + i, (safe_top + tl.log2(total)) * LN2, mask=valid)


@triton.jit
def query_kernel(
    q, k, v, q2, k2, m2, documents, parameters, d_out, log_evidence, delta, dq, d_parameters,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    NOISE_LEARNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, BLOCK_Q)
    block = blocks - 1 - tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    first = keys - queries
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = i < queries
    q_tile = load_rows(q + batch * q_b + head * q_h, i, q_t, valid, SIZE, BLOCK_D)
    d_out_tile = load_rows(d_out + row * queries * SIZE, i, SIZE, valid, SIZE, BLOCK_D)
    q2_rows = tl.load(q2 + row * queries + i, mask=valid, other=0.0)[:, None]
    evidence = tl.load(log_evidence + row * queries + i, mask=valid, other=float("inf"))[:, None]
    delta_rows = tl.load(delta + row * queries + i, mask=valid, other=0.0)[:, None]
    k += batch * k_b + head // GROUP * k_h
    v += batch * v_b + head // GROUP * v_h
    k2 += row // GROUP * keys
    mu, slope, floor, eta_q2, m_inf2, shape = load_noise(parameters, head, heads)
    position = (first + i).to(tl.float32)[:, None]
    q_document = q2_rows
    if DOCUMENTS:
        q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[:, None]

    acc, d_q2 = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    d_mu, d_eta_k2, d_eta_q2, d_floor, d_m_inf2, d_shape = d_q2, d_q2, d_q2, d_q2, d_q2, d_q2
    for start in range(0, tl.minimum(keys, first + (block + 1) * BLOCK_Q), BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        exists = j < keys
        k_tile = load_rows(k, j, k_t, exists, SIZE, BLOCK_D)
        k2_columns = tl.load(k2 + j, mask=exists, other=0.0)[None, :]
        k_document, m2_columns = k2_columns, k2_columns
        if MAGNITUDE:
            m2_columns = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[None, :]
        if DOCUMENTS:
            k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[None, :]
        # Both products first: what follows then needs few registers per pair.
        dots = product(q_tile, tl.trans(k_tile), PRECISION)
        d_weights = product(d_out_tile, tl.trans(load_rows(v, j, v_t, exists, SIZE, BLOCK_D)), PRECISION)
        lag = position - j.to(tl.float32)[None, :]
        decay, decay2, numerator, inverse, inverse_query, free, r2, y, log2_weight = scores(
            dots, lag, q2_rows, k2_columns, m2_columns, q_document, k_document,
            mu, slope, floor, eta_q2, m_inf2, shape, SIZE, KERNEL, MAGNITUDE, DECAY_KEYS, DOCUMENTS,
        )  # fmt: skip
        applied, g, d_r2, gated, steepness = gradients(
            decay, numerator, inverse, free, r2, y, log2_weight, d_weights, evidence, delta_rows, shape,
            SIZE, KERNEL, DECAY_VALUES,
        )  # fmt: skip
        if NOISE_LEARNS:
            d_numerator = (g - gated) / numerator
            d_variance_query = gated * inverse_query
            d_variance = d_variance_query - g * inverse
            d_log_decay2 = d_variance * slope * decay2
            if MAGNITUDE:
                d_m_inf2 += tl.sum(d_numerator, 1)
                d_log_decay2 += d_numerator * m2_columns * decay2
            if DECAY_VALUES:
                d_log_decay2 += 0.5 * applied * d_weights
            if DECAY_KEYS:
                d_log_decay2 += d_r2 * decay * (decay * k2_columns - dots)
            d_mu -= 2 * tl.sum(lag * d_log_decay2, 1)
            d_eta_k2 += tl.sum(d_variance * decay2, 1)
            d_eta_q2 += tl.sum(d_variance_query, 1)
            d_floor += tl.sum(d_variance, 1)
            if KERNEL == "student":
                d_shape += tl.sum(g * (steepness * y * (1 / shape) - log2_1p(y) * LN2), 1)
            elif KERNEL == "exponential":
                d_shape += tl.sum(g * y * (1 / shape), 1)
        # ∂q = 2 Σ_j ∂R²(q − E'k): both terms take the same rounded ∂R², so that what cancels still cancels in bf16.
        d_r2 = d_r2.to(k_tile.dtype)
        d_q2 += tl.sum(d_r2.to(tl.float32), 1)
        if DECAY_KEYS:
            d_r2 = (d_r2.to(tl.float32) * decay).to(k_tile.dtype)
        acc += product(d_r2, k_tile, PRECISION)
    dq_tile = 2 * (d_q2[:, None] * q_tile.to(tl.float32) - acc)
    store_rows(dq + row * queries * SIZE, i, SIZE, valid, dq_tile, SIZE, BLOCK_D)
    if NOISE_LEARNS:
        at = d_parameters + (row * blocks + block) * PARAMETERS
        tl.store(at, tl.sum(d_mu, 0))
        tl.store(at + 1, tl.sum(d_eta_k2, 0))
        tl.store(at + 2, tl.sum(d_eta_q2, 0))
        tl.store(at + 3, tl.sum(d_floor, 0))
        tl.store(at + 4, tl.sum(d_m_inf2, 0))
        tl.store(at + 5, tl.sum(d_floor - d_eta_k2, 0))  # σ̃²(1−E²)
        tl.store(at + 6, tl.sum(d_shape, 0))


@triton.jit
def key_kernel(
    q, k, v, q2, k2, m2, documents, parameters, d_out, log_evidence, delta, dk, dv, d_m2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(keys, BLOCK_K)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of (B,G)
    groups = heads // GROUP
    batch, group = row // groups, row % groups
    first = keys - queries
    j = block * BLOCK_K + tl.arange(0, BLOCK_K)
    exists = j < keys
    k_tile = load_rows(k + batch * k_b + group * k_h, j, k_t, exists, SIZE, BLOCK_D)
    v_tile = load_rows(v + batch * v_b + group * v_h, j, v_t, exists, SIZE, BLOCK_D)
    k2_rows = tl.load(k2 + row * keys + j, mask=exists, other=0.0)[:, None]
    k_document, m2_rows = k2_rows, k2_rows
    if MAGNITUDE:
        m2_rows = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[:, None]
    if DOCUMENTS:
        k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[:, None]

    d_value, d_key = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    d_k2, d_magnitude = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32)
    for head in range(group * GROUP, (group + 1) * GROUP):
        query_row = (batch * heads + head) * queries
        mu, slope, floor, eta_q2, m_inf2, shape = load_noise(parameters, head, heads)
        for start in range(tl.maximum(block * BLOCK_K - first, 0) // BLOCK_Q * BLOCK_Q, queries, BLOCK_Q):
            i = start + tl.arange(0, BLOCK_Q)
            valid = i < queries
            q_tile = load_rows(q + batch * q_b + head * q_h, i, q_t, valid, SIZE, BLOCK_D)
            d_out_tile = load_rows(d_out + query_row * SIZE, i, SIZE, valid, SIZE, BLOCK_D)
            q2_columns = tl.load(q2 + query_row + i, mask=valid, other=0.0)[None, :]
            evidence = tl.load(log_evidence + query_row + i, mask=valid, other=float("inf"))[None, :]
            delta_columns = tl.load(delta + query_row + i, mask=valid, other=0.0)[None, :]
            q_document = q2_columns
            if DOCUMENTS:
                q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[None, :]
            dots = product(k_tile, tl.trans(q_tile), PRECISION)  # (keys, queries)
            d_weights = product(v_tile, tl.trans(d_out_tile), PRECISION)
            lag = (first + i).to(tl.float32)[None, :] - j.to(tl.float32)[:, None]
            decay, decay2, numerator, inverse, _, free, r2, y, log2_weight = scores(
                dots, lag, q2_columns, k2_rows, m2_rows, q_document, k_document,
                mu, slope, floor, eta_q2, m_inf2, shape, SIZE, KERNEL, MAGNITUDE, DECAY_KEYS, DOCUMENTS,
            )  # fmt: skip
            applied, g, d_r2, gated, _ = gradients(
                decay, numerator, inverse, free, r2, y, log2_weight, d_weights, evidence, delta_columns, shape,
                SIZE, KERNEL, DECAY_VALUES,
            )  # fmt: skip
            d_value += product(applied.to(d_out_tile.dtype), d_out_tile, PRECISION)
            if MAGNITUDE:
                d_magnitude += tl.sum((g - gated) / numerator * decay2, 1)
            if KERNEL != "gaussian":  # ∂k = 2 Σ_i ∂R² E'(E'k − q)
                if DECAY_KEYS:
                    d_r2 = d_r2 * decay
                d_r2 = d_r2.to(q_tile.dtype)
                d_key += product(d_r2, q_tile, PRECISION)
                d_k2 += tl.sum(d_r2.to(tl.float32) * decay if DECAY_KEYS else d_r2.to(tl.float32), 1)
    dk_tile = 2 * (d_k2[:, None] * k_tile.to(tl.float32) - d_key)
    store_rows(dk + row * keys * SIZE, j, SIZE, exists, dk_tile, SIZE, BLOCK_D)
    store_rows(dv + row * keys * SIZE, j, SIZE, exists, d_value, SIZE, BLOCK_D)
    if MAGNITUDE:
        tl.store(d_m2 + row * keys + j, d_magnitude, mask=exists)
