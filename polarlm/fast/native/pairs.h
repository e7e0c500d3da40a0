// What one vector of query-key pairs goes through between the matrix products: precision, residual, kernel.
// All queries of a vector see the same key, so everything of the key is a scalar and lags are contiguous.
#pragma once
#include "call.h"

// How the kernel's weight is formed. POWER: Student-t with ν+1 = 2, 4, 8 as squarings of 1/(1+y); POWER_LAW: any ν.
enum Form { POWER, POWER_LAW, EXPONENT };

template <class T> struct Head {  // scalars and tables of one head
    const T *own, *floor, *k1, *k2, *key_decay, *value_decay;
    T cap, least, exponent, shape;
    int squarings;  // 0 where ν+1 is none of 2, 4, 8
    Head(const Call& c, Tables<T>& t, int64_t h) {
        own = t.at(h, T_OWN), floor = t.at(h, T_FLOOR), k1 = t.at(h, T_K1), k2 = t.at(h, T_K2);
        key_decay = t.at(h, T_KEY_DECAY), value_decay = t.at(h, T_VALUE_DECAY);
        double s = c.noise[SHAPE * c.heads + h];
        shape = T(s), exponent = T(s + 1), cap = T(c.cap / (c.half * s));
        least = c.dot_form ? -HUGE_VAL : 0;  // residuals are distances, unless only their cross term is kept
        squarings = s == 1 ? 1 : s == 3 ? 2 : s == 7 ? 3 : 0;
    }
    Form form(const Call& c, bool in_range) const {
        if (c.kernel != STUDENT) return EXPONENT;
        return squarings && in_range ? POWER : POWER_LAW;
    }
};

template <class T> struct Key {  // scalars of one key
    T k2, m2;
};

template <class T> struct Pair {
    // n and κ; κ̃/(d_h·shape) before and after its cap; ‖R‖² before clamping; y = x/shape; 1/(1+y); log2 of the weight
    Vec<T> n, kappa, free, capped, r2, y, inverse, log2_weight;
};

template <class T, Form FORM, bool DECAY>
inline Pair<T> pair(const Head<T>& head, const Key<T>& key, Vec<T> dot, Vec<T> q2, int64_t lag) {
    Pair<T> p;
    p.n = key.m2 * load(head.own + lag) + load(head.floor + lag);
    p.kappa = p.n * load(head.k1 + lag);
    p.free = p.n * load(head.k2 + lag);
    p.capped = smaller(p.free, all<T>(head.cap));
    if (DECAY) {
        Vec<T> e = load(head.key_decay + lag);
        p.r2 = q2 + e * (e * key.k2 - T(2) * dot);
    } else {
        p.r2 = q2 + key.k2 - T(2) * dot;
    }
    p.y = p.capped * larger(p.r2, all<T>(head.least));
    if (FORM == EXPONENT) {
        p.log2_weight = p.y * T(-LOG2E);
    } else {
        p.inverse = T(1) / (p.y + T(1));
        if (FORM == POWER_LAW) p.log2_weight = -head.exponent * log2_1p<T>(p.y, p.inverse);
    }
    return p;
}

template <class T> inline Vec<T> squared(Vec<T> x, int times) {
    for (int i = 0; i < times; ++i) x *= x;
    return x;
}

template <class T> struct RadialPair {
    Vec<T> cosine, z, residual, y, inverse, log2_weight;  // z = c m̂, y = ρ̃(z − m_i)²/ν
};

// The radial channel of one vector: `scale` turns the correlation into a cosine.
template <class T>
inline RadialPair<T> radial_pair(const Head<T>& tables, T m_key, Vec<T> correlation, Vec<T> scale, Vec<T> m_query, int64_t lag) {
    RadialPair<T> p;
    p.cosine = correlation * scale;
    p.z = p.cosine * load(tables.key_decay + lag) * m_key;
    p.residual = p.z - m_query;
    p.y = load(tables.k2 + lag) * p.residual * p.residual;
    p.inverse = T(1) / (p.y + T(1));
    p.log2_weight = load(tables.k1 + lag) - tables.exponent * log2_1p<T>(p.y, p.inverse);
    return p;
}

template <class T> struct RadialHead : Head<T> {
    RadialHead(const Call& c, Tables<T>& t) : Head<T>(c, t, 0) {
        this->k1 = t.at(c.heads, T_K1), this->k2 = t.at(c.heads, T_K2), this->key_decay = t.at(c.heads, T_KEY_DECAY);
        this->shape = T(c.radial_noise[R_NU]), this->exponent = this->shape + 1;
    }
};

// Calls `body` with the form and the decay as constants.
template <class Body> inline void with_form(Form form, bool decay, Body body) {
    auto chosen = [&](auto d) {
        if (form == POWER) body(std::integral_constant<Form, POWER>(), d);
        if (form == POWER_LAW) body(std::integral_constant<Form, POWER_LAW>(), d);
        if (form == EXPONENT) body(std::integral_constant<Form, EXPONENT>(), d);
    };
    decay ? chosen(std::true_type()) : chosen(std::false_type());
}

// What both passes keep about the unit they work on.
template <class T> struct UnitData {
    using Int = typename Lanes<T>::Int;
    const Call& c;
    Tables<T>& tables;
    Unit unit;
    const T *keys, *values, *magnitude;
    const Int* documents;
    std::vector<Head<T>> heads;

    UnitData(const Call& call, Tables<T>& t, int64_t index) : c(call), tables(t), unit(call, index) {
        keys = (const T*)c.k + unit.batch * c.k_at.batch, values = (const T*)c.v + unit.batch * c.v_at.batch;
        magnitude = c.magnitude ? (const T*)c.magnitude + unit.batch * c.keys : nullptr;
        documents = c.documents ? (const Int*)c.documents + unit.batch * c.keys : nullptr;
        for (int64_t h = 0; h < unit.heads; ++h) heads.emplace_back(c, tables, unit.first_head + h);
    }

    int64_t key_head(int64_t h) const { return (unit.first_head + h) / (c.heads / c.groups); }
    const T* key_rows(int64_t h, int64_t j) const { return keys + key_head(h) * c.k_at.head + j * c.k_at.token; }
    const T* value_rows(int64_t g, int64_t j) const { return values + g * c.v_at.head + j * c.v_at.token; }
    const T* rows(const void* base, const Strides& at, Queries q, int64_t h) const {
        return (const T*)base + unit.batch * at.batch + (unit.first_head + h) * at.head + q.first * at.token;
    }
    T* rows(void* base, const Strides& at, Queries q, int64_t h) const {
        return const_cast<T*>(rows((const void*)base, at, q, h));
    }
    T m2(int64_t j) const {
        const T m = magnitude ? std::max(magnitude[j], T(c.least_magnitude)) : 1;
        return m * m;
    }
    const T* forgotten(int64_t h) const {  // running sums of log λ
        return c.forgotten ? (const T*)c.forgotten + (unit.batch * c.heads + unit.first_head + h) * c.forgotten_row : nullptr;
    }
    void measure_forgotten(Queries q, T* of_queries) const {
        std::fill_n(of_queries, unit.heads * BLOCK, T(0));
        for (int64_t h = 0; c.forgotten && h < unit.heads; ++h)
            for (int64_t i = 0; i < q.count; ++i) of_queries[h * BLOCK + i] = forgotten(h)[q.position + i];
    }
    // log2 of what a key counts after the λ between it and the queries; never above 0, also where nothing is seen.
    // The difference first: sums over many tokens are large, and their last digits are what counts.
    static Vec<T> faded(const T* of_queries, T of_key) { return smaller(load(of_queries) - of_key, all<T>(0)) * T(LOG2E); }
    IntVec<T> same_document(Queries q, int64_t i, int64_t key) const {
        IntVec<T> ids;
        std::memcpy(&ids, documents + q.position + i, sizeof ids);  // the caller pads documents by a vector
        return ids == documents[key];
    }

    // Queries' rows turned into columns, their ‖q‖², and the factor that turns correlations into cosines.
    void measure_queries(Queries q, T* turned, T* q2, T* cosine_scale, T* own_values) const {
        std::fill_n(q2, unit.heads * BLOCK, T(0)), std::fill_n(cosine_scale, BLOCK, T(0));
        for (int64_t h = 0; h < unit.heads; ++h) {
            const T* of_head = rows(c.q, c.q_at, q, h);
            transpose(of_head, c.q_at.token, q.count, q.lanes, c.size, turned + h * c.size * BLOCK);
            for (int64_t i = 0; i < q.count; ++i) {
                const T norm = square_norm(of_head + i * c.q_at.token, c.size);
                q2[h * BLOCK + i] = c.dot_form ? 0 : norm, cosine_scale[i] += norm;
            }
        }
        for (int64_t i = 0; i < q.count; ++i)
            cosine_scale[i] = c.by_queries()  ? inverse_root(cosine_scale[i])
                              : c.by_values() ? T(1) / T(c.groups * 2 * c.half)
                                              : T(1);
        for (int64_t g = 0; c.by_values() && g < c.groups; ++g)
            transpose(value_rows(g, q.position), c.v_at.token, q.count, q.lanes, c.size, own_values + g * c.size * BLOCK);
    }

    // Σ_h q·k of the heads' dot products in `pairs`, or Σ_g v·v, or 1.
    void correlate(Queries q, Keys k, const T* pairs, const T* own_values, T* correlation) const {
        if (c.by_values()) {
            for (int64_t g = 0; g < c.groups; ++g) {
                const T *of_keys = value_rows(g, k.first), *own = own_values + g * c.size * BLOCK;
                g ? dots<T, true>(q, k, c.size, of_keys, c.v_at.token, own, correlation)
                  : dots<T, false>(q, k, c.size, of_keys, c.v_at.token, own, correlation);
            }
            return;
        }
        for (int64_t j = 0; j < k.count; ++j)
            for (int64_t i = first_lane<T>(q, k.first + j); i < q.lanes; i += WIDTH<T>) {
                Vec<T> sum = all<T>(c.by_queries() ? 0 : 1);
                for (int64_t h = 0; c.by_queries() && h < unit.heads; ++h) sum += load(pairs + (h * BLOCK + j) * BLOCK + i);
                store<T>(correlation + j * BLOCK + i, sum);
            }
    }
};
