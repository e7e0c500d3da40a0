// One new token per row of a batch, with a cache: from the raw projections to what leaves the heads.
// The directional and radial estimates are those of forward.h; around them the same steps as in the mixers.
#pragma once
#include "forward.h"
#include "rows.h"

struct Decode {
    Call call;  // of one row and one query; q, k, v, magnitude and all outputs are pointed at below
    int64_t projection, turns_values, norms_values, alpha_by_m;
    int64_t token_row, cache_row, magnitude_row;            // distance of a row from the next
    double radius, eps, alpha, beta, clamp;                 // radius 0: q and k stay as they are; clamp < 0: none
    const void *q, *k, *v, *cos, *sin;                      // H·Dh, G·Dh and G·Dh of each token_row, (Dh/2) twice
    void *keys, *values, *magnitudes;  // caches (rows,G,·,Dh), (rows,·) or null
    const void* log_forget;            // (rows,H), of the new tokens
    void *forgotten, *tables;          // running sums (rows,H,·) or null
};

template <class T> class DecodeRow {
    const Decode& d;
    Call c;
    T *query, *mean, *own, *evidence, *sums, *shifts, *head_m_bar;
    T m = 1, m_bar = 1, radial_evidence = 0;

   public:
    DecodeRow(const Decode& decode, int64_t row) : d(decode), c(decode.call) {
        const int64_t queries = c.heads * c.size, keys = c.groups * c.size, at = c.keys - 1;
        thread_local std::vector<T> memory;
        memory.resize(2 * queries + keys + 4 * c.heads + 7 * 16);
        Pieces<T> pieces{memory.data()};
        query = pieces.take(queries), mean = pieces.take(queries), own = pieces.take(keys);
        for (T** x : {&evidence, &sums, &shifts, &head_m_bar}) *x = pieces.take(c.heads);
        const int64_t from = row * d.token_row;
        store_token((const T*)d.q + from, (const T*)d.k + from, (const T*)d.v + from, row * d.cache_row + at * c.k_at.token);
        c.q = query, c.k = (T*)d.keys + row * d.cache_row, c.v = (T*)d.values + row * d.cache_row;
        if (d.magnitudes) ((T*)(c.magnitude = (T*)d.magnitudes + row * d.magnitude_row))[at] = m;
        if (d.forgotten) {
            T* sums = (T*)d.forgotten + row * c.heads * c.forgotten_row;
            c.forgotten = sums;
            for (int64_t h = 0; h < c.heads; ++h, sums += c.forgotten_row)
                sums[at] = (at ? sums[at - 1] : T(0)) + ((const T*)d.log_forget)[row * c.heads + h];
        }
        c.out = mean, c.evidence = evidence, c.sums = sums, c.shifts = shifts;
        c.m_bar = &m_bar, c.radial_evidence = &radial_evidence, c.head_m_bar = head_m_bar;
    }

    void run(T* out) {
        Tables<T>& tables = *static_cast<Tables<T>*>(d.tables);
        for (int64_t unit = 0; unit < c.units(); ++unit) ForwardBlock<T>(c, tables, unit).run();
        for (int64_t h = 0; d.turns_values && h < c.heads; ++h) turn(mean + h * c.size, mean + h * c.size, T(-1));
        Tangent<T>& tangent = Tangent<T>::of(c.heads);
        for (int64_t h = 0; h < c.heads; ++h)
            inner(own_of(h), mean + h * c.size, c.size, tangent.along[h], tangent.square[h]), tangent.evidence[h] = evidence[h];
        tangent.find(d.projection, d.clamp);
        const T step = T(d.alpha) * (d.alpha_by_m ? m : T(1)), radial = c.radial != OFF ? T(d.beta) * (m_bar - m) : T(0);
        for (int64_t h = 0; h < c.heads; ++h)
            for (int64_t i = 0; i < c.size; ++i)
                out[h * c.size + i] = step * (mean[h * c.size + i] - tangent.lost[h] * own_of(h)[i]) + radial * own_of(h)[i];
    }

   private:
    const T* own_of(int64_t h) const { return own + h / (c.heads / c.groups) * c.size; }
    void turn(const T* x, T* y, T sign) const { turned(x, (const T*)d.cos, (const T*)d.sin, sign, c.size / 2, y); }

    // The token's query into `query`, its key and value into the caches, its value before turning into `own`.
    void store_token(const T* q, const T* k, const T* v, int64_t at) {
        if (d.norms_values) m = to_sphere(v, c.groups * c.size, T(1), T(d.eps), own);
        else std::copy(v, v + c.groups * c.size, own);
        auto placed = [&](const T* x, T* y) {
            if (d.radius > 0) to_sphere(x, c.size, T(d.radius), T(d.eps), y), x = y;
            turn(x, y, T(1));
        };
        for (int64_t h = 0; h < c.heads; ++h) placed(q + h * c.size, query + h * c.size);
        for (int64_t g = 0; g < c.groups; ++g) {
            T* value = (T*)d.values + at + g * c.k_at.head;
            placed(k + g * c.size, (T*)d.keys + at + g * c.k_at.head);
            if (d.turns_values) turn(own + g * c.size, value, T(1));
            else std::copy(own + g * c.size, own + (g + 1) * c.size, value);
        }
    }
};
