"""The radial channel on a GPU: a soft-max over magnitudes, its cosines from products over all heads at once.

    radial_kernel        a block of queries over its keys: m̄ and log2-evidence, weights summed as they come
    radial_pairs_kernel  a block of pairs: ∂c, and the block's share of every other gradient
c_ij = ⟨own_i, other_j⟩ (B,T,P), (B,S,P), already scaled and padded to whole blocks of channels; both None: c = 1. With
ρ = 1/(η_k²E² + σ0²), ρ̃ = 1/(η_k²E² + σ0² + η_q²), z = c E m_j and y = ρ̃(z − m_i)²/ν a weight is ρ(1+y)^−(ν+1). It is
one power per pair whether ν learns or not: one channel beside H heads. Every result has one owner, as in
triton_kernels.py; launched by triton_backend.py.
"""

from collections import namedtuple

import triton
import triton.language as tl

from .triton_tiles import LN2, LOG2E, MIN_DECAY2, load_each, load_rows, product

# Weights are summed in units of 2^−SHIFT while all sums surely lie between 2^LEAST and 2^MOST: then they, and every
# weight that counts beside them, are normal fp32 numbers.
SHIFT, LEAST, MOST = tl.constexpr(64.0), tl.constexpr(-144.0), tl.constexpr(46.0)

# all_queries and all_keys are the distances of batch rows: queries and keys may be a part of them.
Inputs = namedtuple(
    "Inputs", "own other m documents parameters own_b own_t other_b other_t all_queries all_keys channels queries keys"
)
Noise = namedtuple("Noise", "mu eta_k2 eta_q2 sigma02 nu")  # mu times log2 e
Queries = namedtuple("Queries", "batch i at valid m document")
# Of every pair: c, E, E², ρ̃, ρ (0 if not seen), z, z − m_i, y, 1/(1+y).
Pairs = namedtuple("Pairs", "cosine decay decay2 inverse_query kappa z residual y inverse_y")
PARAMETERS = tl.constexpr(5)


@triton.jit
def log2_1p(y):
    """log2(1+y), y ≥ 0, with what rounding 1+y lost put back."""
    one_plus = 1 + y
    return tl.log2(one_plus) + LOG2E * tl.where(y < 1, y - (one_plus - 1), 0.0)


@triton.jit
def radial_weigh(pairs, log2_scale, nu):
    """2^log2_scale ρ (1+y)^−(ν+1) of every pair, the scale one per query."""
    weights = tl.exp2(log2_scale - (nu + 1) * log2_1p(pairs.y))
    return tl.where(pairs.kappa > 0, pairs.kappa * weights, 0.0)  # what is not seen may weigh infinitely much


@triton.jit
def load_radial_noise(x):
    at = x.parameters
    return Noise(tl.load(at) * LOG2E, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))


@triton.jit
def queries_of(x, batch, block, S: tl.constexpr):
    i = block * S.block_q + tl.arange(0, S.block_q)
    at, valid = x.keys - x.queries + i, i < x.queries
    m = load_each(x.m, batch * x.all_keys, at, valid, 0.0, 1)
    return Queries(batch, i, at, valid, m, load_each(x.documents, batch * x.all_keys, at, valid, -1, 1))


@triton.jit
def channels_of(x, own, j, exists, channel, S: tl.constexpr):
    """Channels from `channel` on of the queries and of keys j."""
    a = load_rows(x.own + own.batch * x.own_b + channel, own.i, x.own_t, own.valid, S)
    return a, load_rows(x.other + own.batch * x.other_b + channel, j, x.other_t, exists, S)


@triton.jit
def radial_scores(cosine, lag, own, m_key, k_document, noise):
    decay = tl.exp2(-noise.mu * tl.maximum(lag, 0.0))
    decay2 = tl.maximum(decay * decay, MIN_DECAY2)
    variance = noise.eta_k2 * decay2 + noise.sigma02
    inverse_query = 1 / (variance + noise.eta_q2)
    z = cosine * decay * m_key
    residual = z - own.m
    y = inverse_query * residual * residual * (1 / noise.nu)
    kappa = tl.where((lag >= 0) & (own.document == k_document), 1 / variance, 0.0)
    return Pairs(cosine, decay, decay2, inverse_query, kappa, z, residual, y, 1 / (1 + y))


@triton.jit
def radial_pairs(x, own, start, noise, S: tl.constexpr):
    """Lags of the queries with the keys from `start` on, the keys' magnitudes, and all of the pairs."""
    j = start + tl.arange(0, S.block_k)
    exists = j < x.keys
    cosine = tl.full([S.block_q, S.block_k], 1.0 if x.own is None else 0.0, tl.float32)
    if x.own is not None:
        for channel in range(0, x.channels, S.block_d):
            a, b = channels_of(x, own, j, exists, channel, S)
            cosine += product(a, tl.trans(b), S)
    lag = (own.at[:, None] - j[None, :]).to(tl.float32)
    m_key = load_each(x.m, own.batch * x.all_keys, j, exists, 0.0, 0)
    document = load_each(x.documents, own.batch * x.all_keys, j, exists, -1, 0)
    return lag, m_key, radial_scores(cosine, lag, own, m_key, document, noise)


@triton.jit
def radial_leaves_range(x, own, largest_m, noise, S: tl.constexpr):
    """Whether Σw or Σwz of a row may leave the range: as in triton_kernels.py, with |c| ≤ 1."""
    cosine = tl.full([S.block_q], 1.0 if x.own is None else 0.0, tl.float32)
    if x.own is not None:
        for channel in range(0, x.channels, S.block_d):
            a, b = channels_of(x, own, own.at, own.valid, channel, S)
            cosine += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    self = radial_scores(cosine[:, None], cosine[:, None] * 0, own, own.m, own.document, noise)
    least = tl.log2(self.kappa) - (noise.nu + 1) * log2_1p(self.y)
    near, far = noise.eta_k2 + noise.sigma02, noise.eta_k2 * MIN_DECAY2 + noise.sigma02
    largest = tl.maximum(tl.load(largest_m + own.batch), 1.0)
    log2_most = tl.log2(x.keys * largest / tl.minimum(near, far))
    return (tl.min(tl.min(tl.where(own.valid[:, None], least, 0.0), 1), 0) < LEAST) | (log2_most > MOST)


@triton.jit
def radial_kernel(x, largest_m, m_bar, log2_evidence, S: tl.constexpr):
    blocks = tl.cdiv(x.queries, S.block_q)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    own = queries_of(x, (tl.program_id(0) // blocks).to(tl.int64), block, S)
    end = tl.minimum(x.keys, x.keys - x.queries + (block + 1) * S.block_q)
    noise = load_radial_noise(x)
    leaves = radial_leaves_range(x, own, largest_m, noise, S)
    top = tl.full([S.block_q, 1], float("-inf"), tl.float32)
    for start in range(0, tl.where(leaves, end, 0), S.block_k):
        _, _, pairs = radial_pairs(x, own, start, noise, S)
        logits = tl.where(pairs.kappa > 0, tl.log2(pairs.kappa) - (noise.nu + 1) * log2_1p(pairs.y), top)
        top = tl.maximum(top, tl.max(logits, 1)[:, None])
    log2_scale = tl.where(own.valid[:, None], tl.where(leaves, -top, SHIFT), SHIFT)

    total, weighted = tl.full([S.block_q], 0.0, tl.float32), tl.full([S.block_q], 0.0, tl.float32)
    for start in range(0, end, S.block_k):
        _, _, pairs = radial_pairs(x, own, start, noise, S)
        weights = radial_weigh(pairs, log2_scale, noise.nu)
        total += tl.sum(weights, 1)
        weighted += tl.sum(weights * pairs.z, 1)
    sums = tl.where(own.valid, total, 1.0)
    at = own.batch * x.all_queries + own.i
    tl.store(m_bar + at, weighted / sums, mask=own.valid)
    tl.store(log2_evidence + at[:, None], tl.log2(sums)[:, None] - log2_scale, mask=own.valid[:, None])


@triton.jit
def radial_pairs_kernel(
    x, log2_evidence, m_bar, d_m_bar, d_cosine, d_m_query, d_m_key, d_parameters, S: tl.constexpr
):  # fmt: skip
    query_blocks, key_blocks = tl.cdiv(x.queries, S.block_q), tl.cdiv(x.keys, S.block_k)
    key_block, query_block = tl.program_id(0) % key_blocks, tl.program_id(0) // key_blocks % query_blocks
    batch = (tl.program_id(0) // (key_blocks * query_blocks)).to(tl.int64)
    own, noise = queries_of(x, batch, query_block, S), load_radial_noise(x)
    j = key_block * S.block_k + tl.arange(0, S.block_k)
    row = batch * x.all_queries
    evidence = load_each(log2_evidence, row, own.i, own.valid, float("inf"), 1)
    mean = load_each(m_bar, row, own.i, own.valid, 0.0, 1)
    upstream = load_each(d_m_bar, row, own.i, own.valid, 0.0, 1)

    lag, m_key, pairs = radial_pairs(x, own, key_block * S.block_k, noise, S)
    weights = radial_weigh(pairs, -evidence, noise.nu) * upstream
    g = weights * (pairs.z - mean)  # ∂L
    slope = g * ((noise.nu + 1) * pairs.inverse_y)  # −∂/∂y
    by_y = slope * pairs.y
    d_residual = -2 * slope * pairs.inverse_query * pairs.residual * (1 / noise.nu)
    d_z = weights + d_residual
    if x.own is not None:
        at = (batch * x.queries + own.i[:, None]) * x.keys + j[None, :]
        seen = own.valid[:, None] & (j < x.keys)[None, :]
        tl.store(d_cosine + at, (d_z * pairs.decay * m_key).to(d_cosine.dtype.element_ty), mask=seen)
    at = (batch * key_blocks + key_block) * x.queries + own.i
    tl.store(d_m_query + at, -tl.sum(d_residual, 1), mask=own.valid)
    at = (batch * query_blocks + query_block) * x.keys + j
    tl.store(d_m_key + at, tl.sum(d_z * pairs.cosine * pairs.decay, 0), mask=j < x.keys)

    d_variance_query = by_y * pairs.inverse_query
    d_variance = d_variance_query - g * pairs.kappa  # not seen: both are 0
    d_log_decay = 2 * d_variance * noise.eta_k2 * pairs.decay2 + d_z * pairs.z
    d_nu = by_y * (1 / noise.nu) - g * log2_1p(pairs.y) * LN2
    at = d_parameters + ((batch * query_blocks + query_block) * key_blocks + key_block) * PARAMETERS
    tl.store(at, -tl.sum(tl.sum(lag * d_log_decay, 1), 0))
    tl.store(at + 1, tl.sum(tl.sum(d_variance * pairs.decay2, 1), 0))
    tl.store(at + 2, tl.sum(tl.sum(d_variance_query, 1), 0))
    tl.store(at + 3, tl.sum(tl.sum(d_variance, 1), 0))
    tl.store(at + 4, tl.sum(tl.sum(d_nu, 1), 0))
