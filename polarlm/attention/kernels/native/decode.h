// One new token per row of a batch, with a cache: from the raw projections to what leaves the heads.
// The directional and radial estimates are those of forward.h; around them the same steps as in the mixers.
#pragma once
#include "forward.h"
#include "rows.h"

enum Projection : int64_t { NONE, PER_HEAD, GLOBAL, EVIDENCE };

struct Decode {
    Call call;  // of one row and one query; q, k, v, magnitude and all outputs are pointed at below
    int64_t rows, projection, turns_values, norms_values, alpha_by_m;
    int64_t q_row, k_row, v_row, cache_row, magnitude_row;  // distance of a row from the next
    double radius, eps, alpha, beta, clamp;                 // radius 0: q and k stay as they are; clamp < 0: none
    const void *q, *k, *v, *cos, *sin;                      // (rows,H·Dh), (rows,G·Dh) twice, (Dh/2) twice
    void *keys, *values, *magnitudes, *out;                 // caches (rows,G,·,Dh), (rows,·) or null; (rows,H·Dh)
    void* tables;
};

template <class T> class DecodeRow {
    const Decode& d;
    Call c;
    T *query, *mean, *own, *evidence, *sums, *shifts, *head_m_bar, *along, *square;
    T m = 1, m_bar = 1, radial_evidence = 0;

   public:
    DecodeRow(const Decode& decode, int64_t row) : d(decode), c(decode.call) {
        const int64_t queries = c.heads * c.size, keys = c.groups * c.size, at = c.keys - 1;
        thread_local std::vector<T> memory;
        memory.resize(2 * queries + keys + 6 * c.heads + 9 * 16);
        Pieces<T> pieces{memory.data()};
        query = pieces.take(queries), mean = pieces.take(queries), own = pieces.take(keys);
        for (T** x : {&evidence, &sums, &shifts, &head_m_bar, &along, &square}) *x = pieces.take(c.heads);
        store_token((const T*)d.q + row * d.q_row, (const T*)d.k + row * d.k_row, (const T*)d.v + row * d.v_row,
                    row * d.cache_row + at * c.k_at.token);
        c.q = query, c.k = (T*)d.keys + row * d.cache_row, c.v = (T*)d.values + row * d.cache_row;
        if (d.magnitudes) ((T*)(c.magnitude = (T*)d.magnitudes + row * d.magnitude_row))[at] = m;
        c.out = mean, c.evidence = evidence, c.sums = sums, c.shifts = shifts;
        c.m_bar = &m_bar, c.radial_evidence = &radial_evidence, c.head_m_bar = head_m_bar;
    }

    void run(T* out) {
        Tables<T>& tables = *static_cast<Tables<T>*>(d.tables);
        for (int64_t unit = 0; unit < c.units(); ++unit) ForwardBlock<T>(c, tables, unit).run();
        for (int64_t h = 0; d.turns_values && h < c.heads; ++h) turn(mean + h * c.size, mean + h * c.size, T(-1));
        for (int64_t h = 0; h < c.heads; ++h) {
            along[h] = inner(own_of(h), mean + h * c.size), square[h] = inner(own_of(h), own_of(h));
        }
        const T step = T(d.alpha) * (d.alpha_by_m ? m : T(1)), radial = c.radial != OFF ? T(d.beta) * (m_bar - m) : T(0);
        remove();
        for (int64_t h = 0; h < c.heads; ++h)
            for (int64_t i = 0; i < c.size; ++i)
                out[h * c.size + i] = step * (mean[h * c.size + i] - along[h] * own_of(h)[i]) + radial * own_of(h)[i];
    }

   private:
    const T* own_of(int64_t h) const { return own + h / (c.heads / c.groups) * c.size; }
    void turn(const T* x, T* y, T sign) const { turned(x, (const T*)d.cos, (const T*)d.sin, sign, c.size / 2, y); }
    T inner(const T* a, const T* b) const {
        Vec<T> sum{};
        for (int64_t i = 0; i < c.size; i += WIDTH<T>) sum += load(a + i) * load(b + i);
        return total<T>(sum);
    }

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

    // Turns `along` = ⟨v_h, v̄_h⟩ into how much of v_h the update leaves out (geometry/multihead.py).
    void remove() {
        const T least = std::sqrt(std::numeric_limits<T>::min());
        const int64_t n = c.heads;
        if (d.projection == NONE) std::fill_n(along, n, T(0));
        if (d.projection == PER_HEAD)
            for (int64_t h = 0; h < n; ++h) along[h] /= std::max(square[h], least);
        if (d.projection == GLOBAL) {
            const T share = std::accumulate(along, along + n, T(0)) / std::max(std::accumulate(square, square + n, T(0)), least);
            std::fill_n(along, n, share);
        }
        if (d.projection != EVIDENCE) return;
        const T surest = *std::max_element(evidence, evidence + n);
        T off = 0, top = -HUGE_VAL, sum = 0;
        for (int64_t h = 0; h < n; ++h) {
            const T known = d.clamp >= 0 ? std::max(evidence[h], surest - T(d.clamp)) : evidence[h];
            off += along[h] - square[h];
            sums[h] = square[h] < least ? std::numeric_limits<T>::lowest() : std::log(square[h]) - known;
            top = std::max(top, sums[h]);
        }
        for (int64_t h = 0; h < n; ++h) sum += sums[h] = std::exp(sums[h] - top);
        for (int64_t h = 0; h < n; ++h) along[h] = 1 + off * (sums[h] / sum) / std::max(square[h], least);
    }
};
