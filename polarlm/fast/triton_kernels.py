"""Robust attention on a GPU: three Triton kernels, one pass over the keys, nothing of size N×N in memory.

    forward_kernel  a block of queries over its keys: v̄ and log-evidence, weights summed as they come
    query_kernel    a block of queries over its keys: ∂q, and the block's share of the gradient of each noise parameter
    key_kernel      a block of keys over its queries and query heads: ∂k, ∂v, ∂m², ∂log λ
Each first walks over the tiles in which all keys precede the queries, in the short form of triton_tiles.py, and then
over the rest exactly. Every sum has one owner that adds in a fixed order: no atomics, results repeat bit by bit. A
query row beyond the end gets infinite evidence, hence zero weights. Shapes as in reference.py; launched by
triton_backend.py.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .triton_tiles import (
    HIGH,
    LEAST,
    LN2,
    LOG2E,
    MAX_QUERY_PRECISION,
    MOST,
    decay_between,
    decay_factors,
    exponent_of,
    hide,
    load_each,
    load_noise,
    load_rows,
    log2_robust,
    logarithm2,
    most_precise,
    plain_noise,
    power2,
    product,
    scores,
    stop_at,
    store_rows,
    weigh,
    weigh_exactly,
)

PARAMETERS = tl.constexpr(7)  # μ, η_k², η_q², σ0², m∞², σ̃², and ν or τ

# A block of queries of one head: row of (B,H), indices, positions among the keys, whether they exist, q, ‖q‖²,
# documents, sums of log λ, the head's noise, the position of the first query and the first key that none of them sees.
Queries = namedtuple("Queries", "row batch head i at valid tile q2 document forgotten noise first end")


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
    first = x.keys - x.queries + block * S.block_q
    end = tl.minimum(x.keys, first + S.block_q)
    forgotten = load_each(x.forgotten, row * x.keys, at, valid, 0.0, 1)
    return Queries(
        row, batch, head, i, at, valid, tile, q2, document, forgotten, load_noise(x, head, S), first, end
    )  # fmt: skip


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
def log2_faded(x, q_forgotten, k_forgotten):
    """log2 of what a key still counts for a query, 0 in the future, where it would be infinite."""
    if x.forgotten is None:
        return 0.0
    else:
        return tl.minimum(q_forgotten - k_forgotten, 0.0) * LOG2E


# Keys from `start` on: their rows, ‖k‖² and m², products with the queries, lags, E and E².
Tile = namedtuple("Tile", "k k2 m2 dots lag decay decay2")


@triton.jit
def exact_pairs(x, own, start, S: tl.constexpr):
    """The tile of keys from `start` on, all of the pairs, which of them are seen, and what they lost since."""
    j = start + tl.arange(0, S.block_k)
    k_tile, k2, m2, document, forgotten = keys_at(x, own, j, j < x.keys, 0, S)
    dots = product(own.tile, tl.trans(k_tile), S)
    lag = own.at.to(tl.float32)[:, None] - j.to(tl.float32)[None, :]
    decay, decay2 = decay_between(lag, own.noise, S)
    pairs = scores(x, dots, decay, decay2, own.q2, k2, m2, own.noise, S, True)
    seen = lag >= 0
    if x.documents is not None:
        seen = seen & (own.document == document)
    tile = Tile(k_tile, k2, m2, dots, lag, decay, decay2)
    return tile, pairs, seen, log2_faded(x, own.forgotten, forgotten)


@triton.jit
def earlier_pairs(x, own, start, rows, columns, S: tl.constexpr):
    """The same for keys that all precede the queries; what fades is a factor of the key, up to the first query."""
    j = start + tl.arange(0, S.block_k)
    k_tile, k2, m2, document, forgotten = keys_at(x, own, j, j < x.keys, 0, S)
    dots = product(own.tile, tl.trans(k_tile), S)
    decay, decay2 = earlier_decay(own.first - (start + S.block_k - 1), rows, columns, own.noise, S)
    pairs = scores(x, dots, decay, decay2, own.q2, k2, m2, own.noise, S, False)
    faded = 1.0
    if x.forgotten is not None:
        at_first = tl.load(x.forgotten + own.row * x.keys + own.first)
        faded = power2((at_first - forgotten) * LOG2E, S)
    if x.documents is not None:
        pairs, faded = hide(pairs, faded, own.document == document, S)
    lag = own.at.to(tl.float32)[:, None] - j.to(tl.float32)[None, :]
    return Tile(k_tile, k2, m2, dots, lag, decay, decay2), pairs, faded


@triton.jit
def earlier_decay(distance, rows, columns, noise, S: tl.constexpr):
    """E and E² of a tile from those of its rows, its columns and the distance between."""
    if S.constant:
        return 1.0, 1.0
    else:
        decay, decay2 = decay_factors(distance.to(tl.float32), noise, S)
        if S.decay_keys or S.decay_values:
            tile = rows[0] * decay * columns[0]
            return tile, tile * tile
        else:
            return 1.0, rows[1] * decay2 * columns[1]


@triton.jit
def range_of_sums(x, own, largest_m2, largest_k2, S: tl.constexpr):
    """Whether the rows' sums of weights times 2^scale surely lie in [2^LEAST, 2^MOST], and this scale's logarithm.

    A sum holds the weight of the query's own pair, and at most S times the largest κ, and e^−y of the largest q·k.
    """
    noise = own.noise
    k_tile, k2, m2, _, _ = keys_at(x, own, own.at, own.valid, 1, S)
    dots = tl.sum(own.tile.to(tl.float32) * k_tile.to(tl.float32), 1)[:, None]
    decay, decay2 = decay_between(dots * 0, noise, S)
    self = scores(x, dots, decay, decay2, own.q2, k2, m2, noise, S, True)
    least = tl.log2(self.numerator * self.inverse) + log2_robust(self, noise, S)
    most = most_precise(x, largest_m2, own.batch, noise) + own.q2 * 0
    if S.dot:
        longest = tl.sqrt(own.q2 * tl.load(largest_k2 + own.row // S.group))
        most += 2 * LOG2E * noise.scale * tl.minimum(tl.exp2(most), MAX_QUERY_PRECISION) * longest
    log2_scale = HIGH - most if S.kernel == "exponential" else most * 0
    within = (least + log2_scale > LEAST) & (most + log2_scale + tl.log2(x.keys.to(tl.float32)) < MOST)
    inside = tl.min(tl.min((within | (own.valid[:, None] == 0)).to(tl.int32), 1), 0) > 0
    return inside, log2_scale


@triton.jit
def factors_of(own, S: tl.constexpr):
    """E and E² of the queries since the first of them, and of a block's keys until the last of them."""
    rows = decay_factors((own.at - own.first).to(tl.float32)[:, None], own.noise, S)
    return rows, decay_factors((S.block_k - 1 - tl.arange(0, S.block_k)).to(tl.float32)[None, :], own.noise, S)


@triton.jit
def since_first(x, own):
    """log2 of what fades between the first query and each."""
    if x.forgotten is None:
        return own.q2 * 0
    else:
        return tl.minimum(own.forgotten - tl.load(x.forgotten + own.row * x.keys + own.first), 0.0) * LOG2E


@triton.jit
def add_values(x, own, start, weights, decay, total, acc, S: tl.constexpr):
    """The sums of a row's weights and of the values that they multiply."""
    total += tl.sum(weights, 1)[:, None]
    if S.decay_values:
        weights = weights * decay
    v_tile = values(x, own, start, S)
    return total, acc + product(weights.to(v_tile.dtype), v_tile, S)


@triton.jit
def forward_kernel(x, largest_m2, largest_k2, out, log_evidence, S: tl.constexpr):
    own = begin(x, S)
    noise = own.noise
    # Only where sums could leave the range of fp32 is a row's largest weight found first, to sum relative to it.
    inside, log2_scale = range_of_sums(x, own, largest_m2, largest_k2, S)
    top = tl.full([S.block_q, 1], float("-inf"), tl.float32)
    for start in range(0, tl.where(inside, 0, own.end), S.block_k):
        _, pairs, seen, faded = exact_pairs(x, own, start, S)
        logits = tl.log2(pairs.numerator * pairs.inverse) + log2_robust(pairs, noise, S) + faded
        top = tl.maximum(top, tl.max(tl.where(seen, logits, top), 1)[:, None])
    log2_scale = tl.where(inside, log2_scale, tl.where(own.valid[:, None], -top, 0.0))

    total, acc = tl.full([S.block_q, 1], 0.0, tl.float32), tl.full([S.block_q, S.block_d], 0.0, tl.float32)
    middle = tl.where(inside & plain_noise(x, largest_m2, own.batch, noise), own.first // S.block_k * S.block_k, 0)
    rows, columns = factors_of(own, S)
    for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
        for start in range(0, stop_at(middle, noise.shape, S, SQUARES), S.block_k):
            tile, pairs, faded = earlier_pairs(x, own, start, rows, columns, S)
            weights = weigh(pairs, log2_scale, faded, noise, S, SQUARES) * pairs.numerator
            total, acc = add_values(x, own, start, weights, tile.decay, total, acc, S)
    if x.forgotten is not None:
        fades = power2(since_first(x, own), S)
        total, acc = total * fades, acc * fades
    for start in range(middle, own.end, S.block_k):
        tile, pairs, seen, faded = exact_pairs(x, own, start, S)
        weights = weigh_exactly(pairs, seen, log2_scale + faded, noise, S) * pairs.numerator
        total, acc = add_values(x, own, start, weights, tile.decay, total, acc, S)
    sums = tl.where(own.valid[:, None], total, 1.0)
    store_rows(out + own.row * x.queries * S.size, own.i, own.valid, acc / sums, S)
    at = log_evidence + own.row * x.queries + own.i[:, None]
    tl.store(at, (tl.log2(sums) - log2_scale) * LN2, mask=own.valid[:, None])


@triton.jit
def evidence_in_range(lowest, highest, row, S: tl.constexpr):
    """Whether weights may be formed before they are divided by the evidence; exponential ones are formed at once."""
    if S.kernel == "exponential":
        return row >= 0
    else:
        return (tl.load(lowest + row) * LOG2E > LEAST) & (tl.load(highest + row) * LOG2E < MOST)


# Shares of the noise parameters, per row of a tile.
Shares = namedtuple("Shares", "eta_q2 floor eta_k2 m_inf2 mu shape")


@triton.jit
def add_queries(x, noise, tile, pairs, per_num, d_weights, delta, shares, d_q2, acc, S: tl.constexpr):
    """Shares of the noise parameters, and the two sums of ∂q ∝ Σ_j ∂R²(q − E'k); `per_num` are weights over num.

    Both terms take the same rounded ∂R², so that what cancels still cancels in bf16.
    """
    if S.decay_values:
        d_weights = d_weights * tile.decay
    g_per_num = per_num * (d_weights - delta)
    g = g_per_num * pairs.numerator
    exact = g * pairs.sharp
    eta_q2, floor, eta_k2, m_inf2, mu, shape = shares
    exponent = exponent_of(noise, S)
    if S.noise_learns:
        d_query = g * pairs.share * pairs.inverse_query
        d_variance = d_query * (exponent / noise.scale) - g * pairs.inverse
        d_log_decay2 = d_variance * noise.slope
        if x.m2 is not None:
            d_numerator = g_per_num * (1 - exponent * pairs.share)
            m_inf2 += tl.sum(d_numerator, 1)[:, None]
            d_log_decay2 += d_numerator * tile.m2
        d_log_decay2 = d_log_decay2 * tile.decay2
        if S.decay_values:
            d_log_decay2 += 0.5 * per_num * pairs.numerator * d_weights
        if S.decay_keys:
            d_log_decay2 -= exponent * exact * tile.decay * (tile.decay * tile.k2 - tile.dots)
        mu += tl.sum(tile.lag * d_log_decay2, 1)[:, None]
        eta_q2 += tl.sum(d_query, 1)[:, None]
        floor += tl.sum(d_variance, 1)[:, None]
        eta_k2 += tl.sum(d_variance * tile.decay2, 1)[:, None]
    if S.shape_learns:
        by_shape = (1 - pairs.t if S.kernel == "student" else pairs.t) * (exponent / noise.shape)
        if S.kernel == "student":
            by_shape += LN2 * logarithm2(pairs.t, S)
        shape += tl.sum(g * by_shape, 1)[:, None]
    d_r2 = exact.to(tile.k.dtype)
    if not S.dot:
        d_q2 += row_sums(d_r2, S)
    if S.decay_keys:
        d_r2 = (d_r2.to(tl.float32) * tile.decay).to(tile.k.dtype)
    return Shares(eta_q2, floor, eta_k2, m_inf2, mu, shape), d_q2, acc + product(d_r2, tile.k, S)


@triton.jit
def row_sums(tile, S: tl.constexpr):
    """Sums of the rows of an operand, 16 times each: by the tensor cores, which need not unpack it."""
    return product(tile, tl.full([tile.shape[1], 16], 1.0, tl.float32).to(tile.dtype), S)


@triton.jit
def one_of_equal(sums):
    """The (rows, 1) of which `row_sums` has 16."""
    return tl.max(sums, 1)[:, None]


@triton.jit
def query_kernel(x, largest_m2, lowest, highest, d_out, log_evidence, delta, dq, d_parameters, S: tl.constexpr):
    own = begin(x, S)
    noise, row = own.noise, own.row * x.queries
    d_out_tile = load_rows(d_out + row * S.size, own.i, S.size, own.valid, S)
    log2_evidence = load_each(log_evidence, row, own.i, own.valid, float("inf"), 1) * LOG2E
    delta_rows = load_each(delta, row, own.i, own.valid, 0.0, 1)

    acc, d_q2 = tl.full([S.block_q, S.block_d], 0.0, tl.float32), tl.full([S.block_q, 16], 0.0, tl.float32)
    none = tl.full([S.block_q, 1], 0.0, tl.float32)
    shares = Shares(none, none, none, none, none, none)
    plain = evidence_in_range(lowest, highest, own.row, S) & plain_noise(x, largest_m2, own.batch, noise)
    middle = tl.where(plain, own.first // S.block_k * S.block_k, 0)
    rows, columns = factors_of(own, S)
    log2_rows = since_first(x, own) - log2_evidence
    for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
        for start in range(0, stop_at(middle, noise.shape, S, SQUARES), S.block_k):
            tile, pairs, faded = earlier_pairs(x, own, start, rows, columns, S)
            d_weights = product(d_out_tile, tl.trans(values(x, own, start, S)), S)
            per_num = weigh(pairs, log2_rows, faded, noise, S, SQUARES)
            shares, d_q2, acc = add_queries(x, noise, tile, pairs, per_num, d_weights, delta_rows, shares, d_q2, acc, S)
    if S.kernel != "exponential":  # each row's weights are still to be divided by its evidence
        per_row = power2(tl.minimum(log2_rows, MOST), S)
        acc, d_q2 = acc * per_row, d_q2 * per_row
        eta_q2, floor, eta_k2, m_inf2, mu, shape = shares
        shares = Shares(
            eta_q2 * per_row, floor * per_row, eta_k2 * per_row, m_inf2 * per_row, mu * per_row, shape * per_row
        )  # fmt: skip
    for start in range(middle, own.end, S.block_k):
        tile, pairs, seen, faded = exact_pairs(x, own, start, S)
        d_weights = product(d_out_tile, tl.trans(values(x, own, start, S)), S)
        per_num = weigh_exactly(pairs, seen, faded - log2_evidence, noise, S)
        shares, d_q2, acc = add_queries(x, noise, tile, pairs, per_num, d_weights, delta_rows, shares, d_q2, acc, S)
    q_again = load_rows(x.q + own.batch * x.q_b + own.head * x.q_h, own.i, x.q_t, own.valid, S)
    gradient = -2 * exponent_of(noise, S) * (one_of_equal(d_q2) * q_again.to(tl.float32) - acc)
    store_rows(dq + row * S.size, own.i, own.valid, gradient, S)
    if S.noise_learns:
        blocks = tl.cdiv(x.queries, S.block_q)
        block = (own.first - (x.keys - x.queries)) // S.block_q
        store_shares(d_parameters + (own.row * blocks + block) * PARAMETERS, shares, noise, S)


# A block of keys of a key head, and what it reads of one query head and a block of its queries.
Keys = namedtuple("Keys", "batch group j exists k v k2 m2 document last")
Head = namedtuple("Head", "head query_row key_row noise forgotten fades rows columns")
# Sums over queries, of a key: of ∂‖k‖², ∂log λ and ∂m².
Sums = namedtuple("Sums", "k2 fading m2")


@triton.jit
def queries_at(x, keys, head, d_out, log_evidence, delta, start, S: tl.constexpr):
    """Queries from `start` on: rows of q and ∂v̄, both products with the keys, and a number per query of each kind."""
    i = start + tl.arange(0, S.block_q)
    valid, at = i < x.queries, x.keys - x.queries + i
    q_tile = load_rows(x.q + keys.batch * x.q_b + head.head * x.q_h, i, x.q_t, valid, S)
    d_out_tile = load_rows(d_out + head.query_row * S.size, i, S.size, valid, S)
    dots, d_weights = product(keys.k, tl.trans(q_tile), S), product(keys.v, tl.trans(d_out_tile), S)
    q2 = load_each(x.q2, head.query_row, i, valid, 0.0, 0)
    document = load_each(x.documents, keys.batch * x.keys, at, valid, -1, 0)
    forgotten = load_each(x.forgotten, head.key_row, at, valid, 0.0, 0)
    log2_evidence = load_each(log_evidence, head.query_row, i, valid, float("inf"), 0) * LOG2E
    upstream = load_each(delta, head.query_row, i, valid, 0.0, 0)
    lag = at.to(tl.float32)[None, :] - keys.j.to(tl.float32)[:, None]
    return q_tile, d_out_tile, dots, d_weights, q2, document, forgotten, log2_evidence, upstream, lag


@triton.jit
def add_keys(
    x, noise, q_tile, d_out_tile, pairs, per_num, d_weights, delta, decay, decay2, sums, d_key, d_value, S: tl.constexpr
):
    """Add a tile's share to the sums of its keys; `per_num` are the weights over num."""
    applied = per_num * pairs.numerator
    if S.decay_values:
        applied, d_weights = applied * decay, d_weights * decay
    d_value += product(applied.to(d_out_tile.dtype), d_out_tile, S)
    g_per_num = per_num * (d_weights - delta)
    g = g_per_num * pairs.numerator
    exponent = exponent_of(noise, S)
    k2, fading, m2 = sums
    if x.forgotten is not None:
        fading += tl.sum(g, 1)[:, None]
    if x.m2 is not None:
        m2 += tl.sum(g_per_num * (1 - exponent * pairs.share) * decay2, 1)[:, None]
    if S.kernel != "gaussian":  # ∂k ∝ Σ_i ∂R² E'(E'k − q)
        d_r2 = g * pairs.sharp
        if S.group > 1:
            d_r2 = d_r2 * exponent
        if S.decay_keys:
            d_r2 = d_r2 * decay
        d_r2 = d_r2.to(q_tile.dtype)
        d_key += product(d_r2, q_tile, S)
        if S.decay_keys:
            d_r2 = (d_r2.to(tl.float32) * decay).to(q_tile.dtype)
        if not S.dot:
            k2 += row_sums(d_r2, S)
    return Sums(k2, fading, m2), d_key, d_value


@triton.jit
def key_kernel(x, largest_m2, lowest, highest, d_out, log_evidence, delta, dk, dv, d_m2, d_forgotten, S: tl.constexpr):
    blocks = tl.cdiv(x.keys, S.block_k)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of (B,G)
    groups = x.heads // S.group
    batch, group = row // groups, row % groups
    first = x.keys - x.queries
    j = block * S.block_k + tl.arange(0, S.block_k)
    exists = j < x.keys
    keys = Keys(
        batch, group, j, exists,
        load_rows(x.k + batch * x.k_b + group * x.k_h, j, x.k_t, exists, S),
        load_rows(x.v + batch * x.v_b + group * x.v_h, j, x.v_t, exists, S),
        load_each(x.k2, row * x.keys, j, exists, 0.0, 1), load_each(x.m2, batch * x.keys, j, exists, 1.0, 1),
        load_each(x.documents, batch * x.keys, j, exists, -1, 1),
        tl.minimum(block * S.block_k + S.block_k, x.keys) - 1,
    )  # fmt: skip
    none = tl.full([S.block_k, 1], 0.0, tl.float32)
    d_key, d_value = tl.full([S.block_k, S.block_d], 0.0, tl.float32), tl.full([S.block_k, S.block_d], 0.0, tl.float32)
    d_k2, d_magnitude = tl.full([S.block_k, 16], 0.0, tl.float32), none
    scale = 1.0  # ν + 1, which heads of a group do not share
    begins = tl.maximum(block * S.block_k - first, 0) // S.block_q * S.block_q
    after = tl.cdiv(tl.maximum(block * S.block_k + S.block_k - first, 0), S.block_q) * S.block_q
    for member in range(0, S.group):
        head = group * S.group + member
        own = head_of(x, keys, head, S)
        noise = own.noise
        sums = Sums(d_k2, none, d_magnitude)
        plain = evidence_in_range(lowest, highest, batch * x.heads + head, S)
        plain = plain & plain_noise(x, largest_m2, batch, noise)
        middle = tl.where(plain, tl.minimum(after, x.queries), x.queries)
        for start in range(begins, middle, S.block_q):
            q_tile, d_out_tile, dots, d_weights, q2, document, forgotten, log2_evidence, upstream, lag = queries_at(
                x, keys, own, d_out, log_evidence, delta, start, S
            )
            decay, decay2 = decay_between(lag, noise, S)
            pairs = scores(x, dots, decay, decay2, q2, keys.k2, keys.m2, noise, S, True)
            seen = lag >= 0
            if x.documents is not None:
                seen = seen & (keys.document == document)
            log2_scale = log2_faded(x, forgotten, own.forgotten) - log2_evidence
            per_num = weigh_exactly(pairs, seen, log2_scale, noise, S)
            sums, d_key, d_value = add_keys(
                x,
                noise,
                q_tile,
                d_out_tile,
                pairs,
                per_num,
                d_weights,
                upstream,
                decay,
                decay2,
                sums,
                d_key,
                d_value,
                S,
            )
        for SQUARES in tl.static_range(2 if S.forms == 2 else 1):
            for start in range(middle, stop_at(x.queries, noise.shape, S, SQUARES), S.block_q):
                q_tile, d_out_tile, dots, d_weights, q2, document, forgotten, log2_evidence, upstream, lag = queries_at(
                    x, keys, own, d_out, log_evidence, delta, start, S
                )
                decay, decay2 = earlier_decay(first + start - keys.last, own.rows, own.columns, noise, S)
                pairs = scores(x, dots, decay, decay2, q2, keys.k2, keys.m2, noise, S, False)
                log2_scale, fades = -log2_evidence, 1.0
                if x.forgotten is not None:
                    at_last = tl.load(x.forgotten + own.key_row + keys.last)
                    log2_scale += tl.minimum(forgotten - at_last, 0.0) * LOG2E
                if S.kernel != "exponential":
                    fades = power2(log2_scale, S)
                if x.forgotten is not None:
                    fades = fades * own.fades
                if x.documents is not None:
                    pairs, fades = hide(pairs, fades, keys.document == document, S)
                per_num = weigh(pairs, log2_scale, fades, noise, S, SQUARES)
                sums, d_key, d_value = add_keys(
                    x, noise, q_tile, d_out_tile, pairs, per_num, d_weights, upstream, decay, decay2, sums, d_key,
                    d_value, S,
                )  # fmt: skip
        d_k2, d_magnitude = sums.k2, sums.m2
        if S.group == 1:
            scale = exponent_of(noise, S)
        if x.forgotten is not None:
            tl.store(d_forgotten + own.key_row + j[:, None], -sums.fading, mask=exists[:, None])
    k_again = load_rows(x.k + batch * x.k_b + group * x.k_h, j, x.k_t, exists, S)  # not held in registers meanwhile
    d_key = -2 * scale * (one_of_equal(d_k2) * k_again.to(tl.float32) - d_key)
    store_rows(dk + row * x.keys * S.size, j, exists, d_key, S)
    store_rows(dv + row * x.keys * S.size, j, exists, d_value, S)
    if x.m2 is not None:
        tl.store(d_m2 + row * x.keys + j[:, None], d_magnitude, mask=exists[:, None])


@triton.jit
def head_of(x, keys, head, S: tl.constexpr):
    """What the keys need of one query head; E and E² until the last key, and of a block's queries since the first."""
    noise, key_row = load_noise(x, head, S), (keys.batch * x.heads + head) * x.keys
    forgotten, fades = load_each(x.forgotten, key_row, keys.j, keys.exists, 0.0, 1), 1.0
    if x.forgotten is not None:
        fades = power2(tl.minimum(tl.load(x.forgotten + key_row + keys.last) - forgotten, 0.0) * LOG2E, S)
    rows = decay_factors(tl.maximum(keys.last - keys.j, 0).to(tl.float32)[:, None], noise, S)
    columns = decay_factors(tl.arange(0, S.block_q).to(tl.float32)[None, :], noise, S)
    return Head(
        head, (keys.batch * x.heads + head) * x.queries, key_row, noise, forgotten, fades, rows, columns
    )  # fmt: skip


@triton.jit
def store_shares(at, sums, noise, S: tl.constexpr):
    """A block of queries' share of the gradient of each noise parameter."""
    tl.store(at, -2 * tl.sum(tl.sum(sums.mu, 1), 0))
    tl.store(at + 1, tl.sum(tl.sum(sums.eta_k2, 1), 0))
    tl.store(at + 2, tl.sum(tl.sum(sums.eta_q2, 1), 0) * (exponent_of(noise, S) / noise.scale))
    tl.store(at + 3, tl.sum(tl.sum(sums.floor, 1), 0))
    tl.store(at + 4, tl.sum(tl.sum(sums.m_inf2, 1), 0))
    tl.store(at + 5, tl.sum(tl.sum(sums.floor - sums.eta_k2, 1), 0))  # σ̃²(1−E²)
    tl.store(at + 6, tl.sum(tl.sum(sums.shape, 1), 0))
