// What Python hands over (native.py mirrors this struct field by field), and what both passes share.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "product.h"

enum Kernel : int64_t { STUDENT, EXPONENTIAL, GAUSSIAN };
enum Radial : int64_t { OFF, OWN, SHARED };
enum Correlation : int64_t { OF_VALUES, OF_QUERIES, ONE };  // what the radial channel takes its cosine from
enum NoiseRow { MU, ETA_K2, ETA_Q2, SIGMA02, M_INF2, PROCESS2, SHAPE, NOISE_ROWS };  // SHAPE is ν or τ
enum RadialRow { R_MU, R_ETA_K2, R_ETA_Q2, R_SIGMA02, R_NU, RADIAL_ROWS };

struct Strides {
    int64_t batch, head, token;
};

struct Call {
    // B batch, H query heads, G key heads, T queries = the last of S keys, Dh channels (a multiple of the vector width).
    int64_t batch, heads, groups, queries, keys, size;
    int64_t kernel, decay_keys, decay_values, dot_form, radial, correlation;
    int64_t parts, threads, seed, learns_shape, forgotten_row;  // the last: from one head to the next
    double half, dropout, cap, least_magnitude;
    Strides q_at, k_at, v_at, out_at, d_out_at, dq_at;
    const void *q, *k, *v, *magnitude, *documents;  // magnitude, documents (B,S) or null
    const void* forgotten;                          // (B,H,·) running sums of log λ, or null
    const double *noise, *radial_noise;             // (NOISE_ROWS,H), (RADIAL_ROWS,)
    void *out, *evidence;                           // (B,H,T,Dh), (B,H,T)
    void *sums, *shifts;                            // (B,H,T): evidence = log(sum·2^shift), shift 0 where sums allow it
    void *m_bar, *radial_evidence, *head_m_bar;     // (B,T), own: (B,T), shared: (B,H,T)
    const void *d_out, *d_evidence, *d_m_bar;
    void *dq, *dk, *dv, *d_magnitude;  // dk, dv (parts,B,G,S,Dh), d_magnitude (parts,B,units,S), all zeroed
    void* d_forgotten;                 // (parts,B,H,S), zeroed: the keys' share; a query's is that of its evidence
    double *d_noise, *d_radial;        // (parts,B,H,NOISE_ROWS), (parts,B,RADIAL_ROWS), zeroed

    int64_t blocks() const;  // of queries
    bool by_values() const { return radial != OFF && correlation == OF_VALUES; }
    bool by_queries() const { return radial != OFF && correlation == OF_QUERIES; }
    // A unit is what one task may work on alone: the query heads of one key head, or all heads with a radial channel.
    int64_t units() const { return batch * (radial != OFF ? 1 : groups); }
};

constexpr int64_t BLOCK = 64;       // queries and keys of a block of pairs
inline int64_t Call::blocks() const { return (queries + BLOCK - 1) / BLOCK; }
constexpr double LOG_RANGE = 57.0;  // |log Σ weights| up to which sums of weights are formed without a shift
constexpr double NEVER = -1e30;     // logit of a pair that must not be seen

// Rows of numbers that depend on the lag alone, for lags −BLOCK … S+BLOCK−1; `at(row)` points to lag 0.
// κ = n·K1 and κ̃/(d_h·shape) = n·K2 with n = m²·OWN + FLOOR; split so that n stays of the order of m² at any lag.
enum TableRow { T_OWN, T_FLOOR, T_K1, T_K2, T_KEY_DECAY, T_VALUE_DECAY, TABLE_ROWS };

template <class T> struct Tables {
    int64_t length = 0;
    std::vector<T> numbers;
    T* at(int64_t table, int64_t row) { return &numbers[(table * TABLE_ROWS + row) * length + BLOCK]; }
};

// E² = e^{−2μΔ} of successive lags, kept above what would make E²/E² undefined.
struct Decay {
    double ratio, square = 1.0;
    explicit Decay(double mu) : ratio(std::exp(-2 * mu)) {}
    void next() { square = std::max(square * ratio, 1e-280); }
};

struct Variance {  // of κ (1) and of κ̃ (2) at one lag
    double floor1, floor2, one, two;
    Variance(double e2, double eta_k2, double eta_q2, double sigma02, double process2) {
        floor1 = sigma02 + process2 * (1 - e2), floor2 = floor1 + eta_q2;
        one = eta_k2 * e2 + floor1, two = eta_k2 * e2 + floor2;
    }
};

template <class T> void fill_directional(const Call& c, Tables<T>& tables) {
    for (int64_t h = 0; h < c.heads; ++h) {
        auto noise = [&](int row) { return c.noise[row * c.heads + h]; };
        Decay decay(noise(MU));
        T* rows[TABLE_ROWS];
        for (int r = 0; r < TABLE_ROWS; ++r) rows[r] = tables.at(h, r);
        for (int64_t lag = -BLOCK; lag < 0; ++lag) {  // the future: weight 0, nothing undefined
            for (int r = 0; r < TABLE_ROWS; ++r) rows[r][lag] = 0;
            rows[T_FLOOR][lag] = 1;
        }
        for (int64_t lag = 0; lag < c.keys + BLOCK; ++lag, decay.next()) {
            double e2 = decay.square, e = std::sqrt(e2);
            Variance v(e2, noise(ETA_K2), noise(ETA_Q2), noise(SIGMA02), noise(PROCESS2));
            double sum = c.magnitude ? e2 + noise(M_INF2) : 1.0;
            rows[T_OWN][lag] = T(c.magnitude ? e2 / sum : 1.0);
            rows[T_FLOOR][lag] = T(c.magnitude ? noise(M_INF2) / sum : 0.0);
            rows[T_K1][lag] = T(sum / v.one);
            rows[T_K2][lag] = T(c.kernel == GAUSSIAN ? 0.0 : sum / (v.two * c.half * noise(SHAPE)));
            rows[T_KEY_DECAY][lag] = T(c.decay_keys ? e : 1.0);
            rows[T_VALUE_DECAY][lag] = T(c.decay_values ? e : 1.0);
        }
    }
}

// Radial tables: log2 ρ, ρ̃/ν and e^{−μ_r Δ}, in the rows of K1, K2 and KEY_DECAY.
template <class T> void fill_radial(const Call& c, Tables<T>& tables, int64_t table) {
    const double* n = c.radial_noise;
    Decay decay(n[R_MU]);
    T *rho = tables.at(table, T_K1), *rho_query = tables.at(table, T_K2), *e = tables.at(table, T_KEY_DECAY);
    for (int64_t lag = -BLOCK; lag < 0; ++lag) rho[lag] = T(NEVER), rho_query[lag] = 0, e[lag] = 0;
    for (int64_t lag = 0; lag < c.keys + BLOCK; ++lag, decay.next()) {
        Variance v(decay.square, n[R_ETA_K2], n[R_ETA_Q2], n[R_SIGMA02], 0.0);
        rho[lag] = T(-std::log2(v.one)), rho_query[lag] = T(1 / (v.two * n[R_NU])), e[lag] = T(std::sqrt(decay.square));
    }
}

template <class T> Tables<T> make_tables(const Call& c) {
    Tables<T> tables;
    tables.length = c.keys + 2 * BLOCK;
    tables.numbers.resize((c.heads + (c.radial != OFF)) * TABLE_ROWS * tables.length);
    fill_directional(c, tables);
    if (c.radial != OFF) fill_radial(c, tables, c.heads);
    return tables;
}

struct Unit {
    int64_t batch, first_head, heads;
    Unit(const Call& c, int64_t index) {
        const int64_t per_batch = c.units() / c.batch;
        heads = c.heads / per_batch, batch = index / per_batch, first_head = index % per_batch * heads;
    }
};

// A block of queries, and the block of keys it has arrived at.
struct Queries {
    int64_t first, count, lanes, position;  // lanes: count in whole vectors; position: of the first one among the keys
    template <class T> static Queries of(const Call& c, int64_t block) {
        Queries q;
        q.first = block * BLOCK, q.count = std::min(BLOCK, c.queries - q.first);
        q.lanes = (q.count + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>;
        q.position = c.keys - c.queries + q.first;
        return q;
    }
};
struct Keys {
    int64_t first, count;
};

// Scratch memory of a thread, kept between calls: fresh pages would cost more than a small call.
template <class T> T* scratch(int64_t numbers) {
    thread_local std::unique_ptr<void, decltype(&std::free)> memory(nullptr, &std::free);
    thread_local int64_t held = 0;
    int64_t bytes = (numbers * sizeof(T) + 4095) / 4096 * 4096;
    if (bytes > held) memory.reset(std::aligned_alloc(4096, bytes)), held = bytes;
    return static_cast<T*>(memory.get());
}

// Hands out pieces of scratch memory, each on its own cache lines.
template <class T> struct Pieces {
    T* next;
    T* take(int64_t numbers) {
        T* piece = next;
        next += (numbers + 15) / 16 * 16;
        return piece;
    }
    T* take_zeros(int64_t numbers) {
        T* piece = take(numbers);
        std::fill(piece, piece + numbers, T(0));
        return piece;
    }
};

// rows (count × size, `stride` apart) -> columns (size × BLOCK), zero beyond count.
template <class T> void transpose(const T* rows, int64_t stride, int64_t count, int64_t lanes, int64_t size, T* out) {
    for (int64_t d = 0; d < size; ++d) {
        T* to = out + d * BLOCK;
        for (int64_t i = 0; i < count; ++i) to[i] = rows[i * stride + d];
        for (int64_t i = count; i < lanes; ++i) to[i] = 0;
    }
}

constexpr double LEAST_NORM = 1e-12;  // a vector of zeros has cosine 0
template <class T> T inverse_root(T square) { return 1 / std::max(std::sqrt(square), T(LEAST_NORM)); }

template <class T> T square_norm(const T* x, int64_t size) {
    Vec<T> sum{};
    for (int64_t d = 0; d < size; d += WIDTH<T>) sum += load(x + d) * load(x + d);
    return total<T>(sum);
}

// Products over a block of pairs stored key by key, (keys × BLOCK): only what causality leaves.
// pairs = or += keys' rows · (queries' rows)ᵀ
template <class T, bool ADD>
void dots(Queries q, Keys k, int64_t size, const T* rows, int64_t stride, const T* transposed, T* pairs) {
    auto seen = [&](int64_t last, int64_t count) {
        return std::clamp<int64_t>(q.position + last - k.first, 0, count);
    };
    auto whole = [&](int64_t, int64_t) { return std::pair<int64_t, int64_t>(0, size); };
    product<T, ADD>(k.count, q.lanes, Matrix<T>{rows, stride, 1}, transposed, BLOCK, pairs, BLOCK, seen, whole);
}
// queries' rows += pairsᵀ · keys' rows
template <class T>
void to_queries(Queries q, Keys k, int64_t size, const T* pairs, const T* rows, int64_t stride, T* out, int64_t out_row) {
    auto every = [](int64_t, int64_t count) { return count; };
    auto seen = [&](int64_t, int64_t last) {
        return std::pair<int64_t, int64_t>(0, std::clamp<int64_t>(q.position + last - k.first, 0, k.count));
    };
    product<T, true>(q.count, size, Matrix<T>{pairs, 1, BLOCK}, rows, stride, out, out_row, every, seen);
}
// keys' rows += pairs · queries' rows
template <class T>
void to_keys(Queries q, Keys k, int64_t size, const T* pairs, const T* rows, int64_t stride, T* out, int64_t out_row) {
    auto every = [](int64_t, int64_t count) { return count; };
    auto seen = [&](int64_t first, int64_t) {
        return std::pair<int64_t, int64_t>(std::clamp<int64_t>(k.first + first - q.position, 0, q.count), q.count);
    };
    product<T, true>(k.count, size, Matrix<T>{pairs, BLOCK, 1}, rows, stride, out, out_row, every, seen);
}

// First lane whose vector holds a query that sees key `j`.
template <class T> int64_t first_lane(Queries q, int64_t j) {
    return std::max<int64_t>(0, j - q.position) / WIDTH<T> * WIDTH<T>;
}

// Whether no query of the block shares a document with a key of the block, judged by the ranges of their ids.
template <class T> bool strangers(const typename Lanes<T>::Int* documents, Queries q, Keys k) {
    if (!documents) return false;
    auto a = std::minmax_element(documents + q.position, documents + q.position + q.count);
    auto b = std::minmax_element(documents + k.first, documents + k.first + k.count);
    return *a.second < *b.first || *b.second < *a.first;
}

// Dropout factor 0 or 1/(1−p) of key j for WIDTH queries from lane i: a hash of (seed, pair), the same in both passes.
template <class T> Vec<T> kept(const Call& c, int64_t batch, int64_t head, int64_t query, int64_t key) {
    Vec<T> factor{};
    uint64_t row = uint64_t(c.seed) + 0x9e3779b97f4a7c15ull * uint64_t((batch * c.heads + head) * c.keys + key + 1);
    const uint64_t limit = uint64_t(c.dropout * 18446744073709551616.0);
    for (int lane = 0; lane < WIDTH<T>; ++lane) {
        uint64_t x = row ^ (0xd1342543de82ef95ull * uint64_t(query + lane + 1));
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        factor[lane] = (x ^ (x >> 31)) < limit ? T(0) : T(1 / (1 - c.dropout));
    }
    return factor;
}
