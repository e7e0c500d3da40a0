// Forward pass of one block of queries over all keys it sees: weights are summed as they are formed, without a
// running maximum. Should a sum leave the range of the number format, the block is done again relative to its maximum.
#pragma once
#include "pairs.h"

enum Sweep { PLAIN, FIND_MAXIMUM, SHIFTED };

template <class T> class ForwardBlock : UnitData<T> {
    using Base = UnitData<T>;
    using Base::c, Base::unit, Base::heads, Base::magnitude, Base::documents, Base::key_rows, Base::value_rows;
    Queries q;
    T *turned, *own_values, *pairs, *correlation, *logits;   // blocks
    T *q2, *sums, *maxima, *shared, *m_query, *cosine_scale;  // a number per query (and head)
    T *radial_max, *radial_sum, *radial_z, *forgotten_here;

   public:
    ForwardBlock(const Call& call, Tables<T>& t, int64_t item) : Base(call, t, item / call.blocks()) {
        // The longest rows first: nobody waits for a late long one.
        q = Queries::of<T>(c, c.blocks() - 1 - item % c.blocks());
        const int64_t n = unit.heads, block = BLOCK * BLOCK, panel = c.size * BLOCK;
        Pieces<T> pieces{scratch<T>((n + 2) * block + (n + c.groups) * panel + (5 * n + 8) * BLOCK)};
        turned = pieces.take(n * panel), own_values = pieces.take(c.groups * panel);
        pairs = pieces.take(n * block), correlation = pieces.take(block), logits = pieces.take(block);
        q2 = pieces.take(n * BLOCK), sums = pieces.take(n * BLOCK), maxima = pieces.take(n * BLOCK);
        shared = pieces.take(n * BLOCK), m_query = pieces.take_zeros(BLOCK), cosine_scale = pieces.take(BLOCK);
        radial_max = pieces.take(BLOCK), radial_sum = pieces.take(BLOCK), radial_z = pieces.take(BLOCK);
        forgotten_here = pieces.take(n * BLOCK);
        this->measure_forgotten(q, forgotten_here);
        this->measure_queries(q, turned, q2, cosine_scale, own_values);
        for (int64_t i = 0; magnitude && i < q.count; ++i) m_query[i] = magnitude[q.position + i];
    }

    void run() {
        sweep(PLAIN);
        if (!in_range()) sweep(FIND_MAXIMUM), sweep(SHIFTED);
        finish();
    }

   private:
    bool in_range() const {
        for (int64_t h = 0; h < unit.heads; ++h)
            for (int64_t i = 0; i < q.count; ++i)
                if (!(std::fabs(std::log(sums[h * BLOCK + i])) < LOG_RANGE)) return false;
        return true;
    }

    T* out_rows(int64_t h) const { return this->rows(c.out, c.out_at, q, h); }

    void sweep(Sweep phase) {
        for (T* x : {sums, shared}) std::fill_n(x, unit.heads * BLOCK, T(0));
        if (phase != SHIFTED) std::fill_n(maxima, unit.heads * BLOCK, phase == PLAIN ? T(0) : T(NEVER));
        for (T* x : {radial_sum, radial_z}) std::fill_n(x, BLOCK, T(0));
        std::fill_n(radial_max, BLOCK, T(NEVER));
        for (int64_t h = 0; h < unit.heads; ++h)
            for (int64_t i = 0; i < q.count; ++i) std::fill_n(out_rows(h) + i * c.out_at.token, c.size, T(0));
        const int64_t block = BLOCK * BLOCK, panel = c.size * BLOCK;
        for (int64_t first = 0; first < q.position + q.count; first += BLOCK) {
            const Keys k{first, std::min(BLOCK, q.position + q.count - first)};
            if (strangers<T>(documents, q, k)) continue;
            for (int64_t h = 0; h < unit.heads; ++h)
                dots<T, false>(q, k, c.size, key_rows(h, first), c.k_at.token, turned + h * panel, pairs + h * block);
            if (c.radial != OFF && phase != FIND_MAXIMUM) radial(k);
            for (int64_t h = 0; h < unit.heads; ++h) {
                with_form(heads[h].form(c, phase == PLAIN), c.decay_keys || c.decay_values,
                          [&](auto form, auto decay) { weigh<form(), decay()>(h, k, phase); });
                if (phase != FIND_MAXIMUM)
                    to_queries<T>(q, k, c.size, pairs + h * block, value_rows(this->key_head(h), first), c.v_at.token,
                                  out_rows(h), c.out_at.token);
            }
        }
    }

    // Turns the dot products of a head into weights, in place, and sums them.
    template <Form FORM, bool DECAY> void weigh(int64_t h, Keys k, Sweep phase) {
        const Head<T> head = heads[h];
        T *sum = sums + h * BLOCK, *top = maxima + h * BLOCK, *z_sum = shared + h * BLOCK;
        const bool shares = c.radial == SHARED, drops = c.dropout > 0;
        const T* forgotten = this->forgotten(h);
        for (int64_t j = 0; j < k.count; ++j) {
            T *row = pairs + (h * BLOCK + j) * BLOCK, *z = correlation + j * BLOCK;
            const int64_t from = first_lane<T>(q, k.first + j);
            const Key<T> key{c.dot_form ? 0 : square_norm(key_rows(h, k.first + j), c.size), this->m2(k.first + j)};
            const T forgotten_key = forgotten ? forgotten[k.first + j] : T(0);
            for (int64_t i = 0; i < from; i += WIDTH<T>) store<T>(row + i, Vec<T>{});
            for (int64_t i = from; i < q.lanes; i += WIDTH<T>) {
                const int64_t lag = q.position + i - k.first - j;
                auto p = pair<T, FORM, DECAY>(head, key, load(row + i), load(q2 + h * BLOCK + i), lag);
                if (documents) p.kappa = this->same_document(q, i, k.first + j) ? p.kappa : Vec<T>{};
                Vec<T> weight, faded{};
                if (forgotten) faded = Base::faded(forgotten_here + h * BLOCK + i, forgotten_key);
                if constexpr (FORM == POWER) {
                    weight = p.kappa * squared<T>(p.inverse, head.squarings);
                    if (forgotten) weight *= exp2<T>(faded);
                } else {
                    p.log2_weight += faded;
                    if (phase == FIND_MAXIMUM) {
                        Vec<T> seen = p.kappa > Vec<T>{} ? p.log2_weight : all<T>(NEVER);
                        store<T>(top + i, larger(load(top + i), seen));
                        continue;
                    }
                    weight = p.kappa * exp2<T>(p.log2_weight - load(top + i));
                }
                add_to<T>(sum + i, weight);
                if (shares) add_to<T>(z_sum + i, weight * load(z + i));
                if (DECAY) weight *= load(head.value_decay + lag);
                if (drops) weight *= kept<T>(c, unit.batch, unit.first_head + h, q.position + i, k.first + j);
                store<T>(row + i, weight);
            }
        }
    }

    // The radial channel of a block of pairs leaves z = c·m̂ in `correlation`; `own` sums its weights under a running
    // maximum, which costs little for one channel instead of H heads.
    void radial(Keys k) {
        const RadialHead<T> head(c, this->tables);
        this->correlate(q, k, pairs, own_values, correlation);
        alignas(64) T block_max[BLOCK];
        std::fill_n(block_max, BLOCK, T(NEVER));
        for (int64_t j = 0; j < k.count; ++j) {
            const T key_scale = key_norm(k.first + j), m_key = magnitude[k.first + j];
            for (int64_t i = first_lane<T>(q, k.first + j); i < q.lanes; i += WIDTH<T>) {
                T* at = correlation + j * BLOCK + i;
                auto p = radial_pair<T>(head, m_key, load(at), key_scale * load(cosine_scale + i), load(m_query + i),
                                        q.position + i - k.first - j);
                store<T>(at, p.z);
                if (c.radial != OWN) continue;
                if (documents) p.log2_weight = this->same_document(q, i, k.first + j) ? p.log2_weight : all<T>(NEVER);
                store<T>(logits + j * BLOCK + i, p.log2_weight);
                store<T>(block_max + i, larger(load(block_max + i), p.log2_weight));
            }
        }
        if (c.radial != OWN) return;
        for (int64_t i = 0; i < q.lanes; i += WIDTH<T>) {
            const Vec<T> top = larger(load(radial_max + i), load(block_max + i));
            const Vec<T> rescale = exp2<T>(load(radial_max + i) - top);
            store<T>(radial_max + i, top);
            for (T* x : {radial_sum, radial_z}) store<T>(x + i, load(x + i) * rescale);
        }
        for (int64_t j = 0; j < k.count; ++j)
            for (int64_t i = first_lane<T>(q, k.first + j); i < q.lanes; i += WIDTH<T>) {
                const Vec<T> weight = exp2<T>(load(logits + j * BLOCK + i) - load(radial_max + i));
                add_to<T>(radial_sum + i, weight);
                add_to<T>(radial_z + i, weight * load(correlation + j * BLOCK + i));
            }
    }

    T key_norm(int64_t j) const {
        if (!c.by_queries()) return 1;
        T sum = 0;
        for (int64_t h = 0; h < unit.heads; ++h) sum += square_norm(key_rows(h, j), c.size);
        return inverse_root(sum);
    }

    void finish() {
        T mean[BLOCK] = {};
        for (int64_t h = 0; h < unit.heads; ++h) {
            const int64_t at = (unit.batch * c.heads + unit.first_head + h) * c.queries + q.first;
            for (int64_t i = 0; i < q.count; ++i) {
                const T sum = sums[h * BLOCK + i], inverse = 1 / sum;
                T* row = out_rows(h) + i * c.out_at.token;
                for (int64_t d = 0; d < c.size; ++d) row[d] *= inverse;
                const T shift = maxima[h * BLOCK + i];
                ((T*)c.sums)[at + i] = sum, ((T*)c.shifts)[at + i] = shift;
                ((T*)c.evidence)[at + i] = T(shift * LN2 + std::log(sum));
                if (c.radial != SHARED) continue;
                const T estimate = shared[h * BLOCK + i] * inverse;
                ((T*)c.head_m_bar)[at + i] = estimate, mean[i] += estimate / T(c.heads);
            }
        }
        const int64_t at = unit.batch * c.queries + q.first;
        for (int64_t i = 0; i < q.count && c.radial == SHARED; ++i) ((T*)c.m_bar)[at + i] = mean[i];
        for (int64_t i = 0; i < q.count && c.radial == OWN; ++i) {
            ((T*)c.m_bar)[at + i] = radial_z[i] / radial_sum[i];
            ((T*)c.radial_evidence)[at + i] = radial_max[i] + std::log2(radial_sum[i]);
        }
    }
};
