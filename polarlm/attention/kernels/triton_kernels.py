"""Robust attention on a GPU: four Triton kernels, one pass over the keys, nothing of size N×N in memory.

    forward_kernel  a block of queries over its keys: v̄ and log-evidence by online soft-max
    query_kernel    a block of queries over its keys: ∂q
    key_kernel      a block of keys over its queries and query heads: ∂k, ∂v, ∂m²
    lag_kernel      a block diagonal, where all tiles have the same lags: ∂ of the lag tables and of ν or τ
Every sum has one owner that adds in a fixed order: no atomics, results repeat bit by bit. A query row beyond the end
gets infinite evidence, hence zero weights. Shapes as in reference.py; launched by triton_backend.py.
"""

import triton
import triton.language as tl

from .triton_tiles import LN2, LOG2E, PAD, gradients, load_rows, log2_1p, product, scores, store_rows


@triton.jit
def forward_kernel(
    q, k, v, q2, k2, m2, documents, tables, shape, out, log_evidence,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys, table_length, cap,
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
    table, table_row = tables + head * table_length + PAD, heads * table_length
    shape_of_head = tl.load(shape + head)
    q_document, k_document, m2_columns = q2_rows, q2_rows, q2_rows
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
        if MAGNITUDE:
            m2_columns = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[None, :]
        if DOCUMENTS:
            k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[None, :]
        dots = product(q_tile, tl.trans(k_tile), PRECISION)
        n, _, _, decay, _, _, _, _, log2_weight = scores(
            dots, (first + i)[:, None] - j[None, :], table, table_row, q2_rows, k2_columns, m2_columns, q_document,
            k_document, shape_of_head, cap, KERNEL, MAGNITUDE, DECAY_KEYS, DECAY_VALUES, DOCUMENTS,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(log2_weight, 1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing of the row's document seen yet
        weights = tl.exp2(log2_weight - safe_top[:, None])
        if MAGNITUDE:
            weights = n * weights
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
    q, k, v, q2, k2, m2, documents, tables, shape, d_out, log_evidence, delta, dq,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys, table_length, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
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
    table, table_row = tables + head * table_length + PAD, heads * table_length
    shape_of_head = tl.load(shape + head)
    q_document, k_document, m2_columns = q2_rows, q2_rows, q2_rows
    if DOCUMENTS:
        q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[:, None]

    acc, d_q2 = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, tl.minimum(keys, first + (block + 1) * BLOCK_Q), BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        exists = j < keys
        k_tile = load_rows(k, j, k_t, exists, SIZE, BLOCK_D)
        k2_columns = tl.load(k2 + j, mask=exists, other=0.0)[None, :]
        if MAGNITUDE:
            m2_columns = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[None, :]
        if DOCUMENTS:
            k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[None, :]
        dots = product(q_tile, tl.trans(k_tile), PRECISION)
        n, _, _, decay, capped, free, r2, y, log2_weight = scores(
            dots, (first + i)[:, None] - j[None, :], table, table_row, q2_rows, k2_columns, m2_columns, q_document,
            k_document, shape_of_head, cap, KERNEL, MAGNITUDE, DECAY_KEYS, DECAY_VALUES, DOCUMENTS,
        )  # fmt: skip
        d_weights = product(d_out_tile, tl.trans(load_rows(v, j, v_t, exists, SIZE, BLOCK_D)), PRECISION)
        _, _, d_r2, _, _ = gradients(
            n, decay, capped, free, r2, y, log2_weight, d_weights, evidence, delta_rows, shape_of_head, cap,
            KERNEL, MAGNITUDE, DECAY_VALUES,
        )  # fmt: skip
        # ∂q = 2 Σ_j ∂R²(q − E'k): both terms take the same rounded ∂R², so that what cancels still cancels in bf16.
        d_r2 = d_r2.to(k_tile.dtype)
        d_q2 += tl.sum(d_r2.to(tl.float32), 1)
        if DECAY_KEYS:
            d_r2 = (d_r2.to(tl.float32) * decay).to(k_tile.dtype)
        acc += product(d_r2, k_tile, PRECISION)
    dq_tile = 2 * (d_q2[:, None] * q_tile.to(tl.float32) - acc)
    store_rows(dq + row * queries * SIZE, i, SIZE, valid, dq_tile, SIZE, BLOCK_D)


@triton.jit
def key_kernel(
    q, k, v, q2, k2, m2, documents, tables, shape, d_out, log_evidence, delta, dk, dv, d_m2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys, table_length, cap,
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
    k_document, q_document, m2_rows = k2_rows, k2_rows, k2_rows
    if MAGNITUDE:
        m2_rows = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[:, None]
    if DOCUMENTS:
        k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[:, None]

    d_value, d_key = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    d_k2, d_magnitude = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32)
    for head in range(group * GROUP, (group + 1) * GROUP):
        query_row = (batch * heads + head) * queries
        table, table_row = tables + head * table_length + PAD, heads * table_length
        shape_of_head = tl.load(shape + head)
        for start in range(tl.maximum(block * BLOCK_K - first, 0) // BLOCK_Q * BLOCK_Q, queries, BLOCK_Q):
            i = start + tl.arange(0, BLOCK_Q)
            valid = i < queries
            q_tile = load_rows(q + batch * q_b + head * q_h, i, q_t, valid, SIZE, BLOCK_D)
            d_out_tile = load_rows(d_out + query_row * SIZE, i, SIZE, valid, SIZE, BLOCK_D)
            q2_columns = tl.load(q2 + query_row + i, mask=valid, other=0.0)[None, :]
            evidence = tl.load(log_evidence + query_row + i, mask=valid, other=float("inf"))[None, :]
            delta_columns = tl.load(delta + query_row + i, mask=valid, other=0.0)[None, :]
            if DOCUMENTS:
                q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[None, :]
            dots = product(k_tile, tl.trans(q_tile), PRECISION)  # (keys, queries)
            n, own, _, decay, capped, free, r2, y, log2_weight = scores(
                dots, (first + i)[None, :] - j[:, None], table, table_row, q2_columns, k2_rows, m2_rows, q_document,
                k_document, shape_of_head, cap, KERNEL, MAGNITUDE, DECAY_KEYS, DECAY_VALUES, DOCUMENTS,
            )  # fmt: skip
            d_weights = product(v_tile, tl.trans(d_out_tile), PRECISION)
            applied, g, d_r2, gated, _ = gradients(
                n, decay, capped, free, r2, y, log2_weight, d_weights, evidence, delta_columns, shape_of_head, cap,
                KERNEL, MAGNITUDE, DECAY_VALUES,
            )  # fmt: skip
            d_value += product(applied.to(d_out_tile.dtype), d_out_tile, PRECISION)
            if MAGNITUDE:
                d_magnitude += tl.sum((g - gated) / n * own, 1)
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


@triton.jit
def diagonal_sums(tile, BLOCK: tl.constexpr):
    """Sums of a square tile along its diagonals: lags 0 … BLOCK−1 above, and lags u − BLOCK at entry u."""
    r, u = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    skewed = tl.gather(tile, (r - u + BLOCK) % BLOCK, 1)
    return tl.sum(tl.where(r >= u, skewed, 0.0), 0), tl.sum(tl.where(r < u, skewed, 0.0), 0)


@triton.jit
def store_diagonals(sums, number, tile, place, places, BLOCK: tl.constexpr):
    """Both halves of a tile's diagonals into sums (rows, B·H, diagonals, 2, BLOCK)."""
    late, early = diagonal_sums(tile, BLOCK)
    at = sums + ((number * places + place) * 2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, late)
    tl.store(at + BLOCK, early)


@triton.jit
def lag_kernel(
    q, k, v, q2, k2, m2, documents, tables, shape, d_out, log_evidence, delta, sums, d_shape, places,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, queries, keys, table_length, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr, MAGNITUDE: tl.constexpr, DECAY_KEYS: tl.constexpr, DECAY_VALUES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Positions are cut into blocks from 0, so that the tile (p, p − diagonal) has lags diagonal·BLOCK + r − c for all p.
    blocks = tl.cdiv(keys, BLOCK_K)
    diagonal = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of (B,H)
    batch, head = row // heads, row % heads
    first = keys - queries
    q += batch * q_b + head * q_h
    d_out += row * queries * SIZE
    k += batch * k_b + head // GROUP * k_h
    v += batch * v_b + head // GROUP * v_h
    k2 += row // GROUP * keys
    table, table_row = tables + head * table_length + PAD, heads * table_length
    shape_of_head = tl.load(shape + head)
    c = tl.arange(0, BLOCK_K)
    lag = diagonal * BLOCK_K + c[:, None] - c[None, :]

    g_sum = tl.zeros([BLOCK_K, BLOCK_K], tl.float32)
    own_sum, floor_sum, decay_sum, shape_sum = g_sum, g_sum, g_sum, tl.zeros([BLOCK_K], tl.float32)
    for p in range(tl.maximum(diagonal, first // BLOCK_K), blocks):
        i, j = p * BLOCK_K - first + c, (p - diagonal) * BLOCK_K + c
        valid, exists = (i >= 0) & (i < queries), j < keys
        q2_rows = tl.load(q2 + row * queries + i, mask=valid, other=0.0)[:, None]
        evidence = tl.load(log_evidence + row * queries + i, mask=valid, other=float("inf"))[:, None]
        delta_rows = tl.load(delta + row * queries + i, mask=valid, other=0.0)[:, None]
        k2_columns = tl.load(k2 + j, mask=exists, other=0.0)[None, :]
        q_document, k_document, m2_columns = q2_rows, k2_columns, k2_columns
        if MAGNITUDE:
            m2_columns = tl.load(m2 + batch * keys + j, mask=exists, other=1.0)[None, :]
        if DOCUMENTS:
            q_document = tl.load(documents + batch * keys + first + i, mask=valid, other=-1)[:, None]
            k_document = tl.load(documents + batch * keys + j, mask=exists, other=-1)[None, :]
        q_tile = load_rows(q, i, q_t, valid, SIZE, BLOCK_D)
        dots = product(q_tile, tl.trans(load_rows(k, j, k_t, exists, SIZE, BLOCK_D)), PRECISION)
        n, own, floor, decay, capped, free, r2, y, log2_weight = scores(
            dots, lag, table, table_row, q2_rows, k2_columns, m2_columns, q_document, k_document, shape_of_head, cap,
            KERNEL, MAGNITUDE, DECAY_KEYS, DECAY_VALUES, DOCUMENTS,
        )  # fmt: skip
        d_out_tile = load_rows(d_out, i, SIZE, valid, SIZE, BLOCK_D)
        d_weights = product(d_out_tile, tl.trans(load_rows(v, j, v_t, exists, SIZE, BLOCK_D)), PRECISION)
        applied, g, d_r2, gated, slope = gradients(
            n, decay, capped, free, r2, y, log2_weight, d_weights, evidence, delta_rows, shape_of_head, cap,
            KERNEL, MAGNITUDE, DECAY_VALUES,
        )  # fmt: skip
        g_sum += g
        if MAGNITUDE:
            rest = (g - gated) / n
            own_sum += rest * m2_columns * own
            floor_sum += rest * floor
        else:
            own_sum += gated
        if DECAY_VALUES:
            decay_sum += applied * d_weights
        if DECAY_KEYS:
            decay_sum += 2 * d_r2 * decay * (decay * k2_columns - dots)
        if KERNEL == "student":
            shape_sum += tl.sum(g * (slope * y / shape_of_head - log2_1p(y) * LN2), 1)
        elif KERNEL == "exponential":
            shape_sum += tl.sum(g * y / shape_of_head, 1)

    place = tl.program_id(0).to(tl.int64)
    tl.store(d_shape + place, tl.sum(shape_sum, 0))
    store_diagonals(sums, 0, g_sum, place, places, BLOCK_K)
    store_diagonals(sums, 1, own_sum, place, places, BLOCK_K)
    if MAGNITUDE:
        store_diagonals(sums, 2, floor_sum, place, places, BLOCK_K)
    if DECAY_KEYS or DECAY_VALUES:
        store_diagonals(sums, 3 if MAGNITUDE else 2, decay_sum, place, places, BLOCK_K)
