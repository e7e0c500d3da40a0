// Backward pass of a share of one unit's query blocks: pairs are formed again from q·k and the saved log-evidence.
// Gradients of the noise are first summed by lag (g = ∂L, gated = −∂/∂log κ̃, …), then turned into parameters' once.
#pragma once
#include "pairs.h"

// Sums over pairs of equal lag. REST = (g − gated)/n and OWN = m²·REST lead to the numerator of κ, DECAYED is ∂/∂log E.
enum LagRow { L_G, L_GATED, L_REST, L_OWN, L_DECAYED, LAG_ROWS };

template <class T> struct LagSums {
    T* numbers;
    int64_t length;
    T* at(int row) const { return numbers + row * length + BLOCK; }
};

// Gradients of μ, η_k², η_q², σ0², m∞², σ̃² from the sums by lag. A floor of exactly 0 has none, as in the reference.
template <class T>
void noise_gradient(LagSums<T> sums, int64_t lags, const double* noise, int64_t stride, bool numerator, double* out) {
    auto value = [&](int row) { return noise[row * stride]; };
    Decay decay(value(MU));
    for (int64_t lag = 0; lag < lags; ++lag, decay.next()) {
        const double e2 = decay.square;
        Variance v(e2, value(ETA_K2), value(ETA_Q2), value(SIGMA02), value(PROCESS2));
        const double one = -double(sums.at(L_G)[lag]) / v.one, two = double(sums.at(L_GATED)[lag]) / v.two;
        const double floor = (v.floor1 > 0 ? one : 0) + (v.floor2 > 0 ? two : 0);
        double d_e2 = (one + two) * value(ETA_K2) - floor * value(PROCESS2);
        if (value(ETA_K2) > 0) out[ETA_K2] += (one + two) * e2;
        if (v.floor2 > 0) out[ETA_Q2] += two;
        out[SIGMA02] += floor, out[PROCESS2] += floor * (1 - e2);
        if (numerator) {
            const double sum = e2 + value(M_INF2);
            d_e2 += double(sums.at(L_OWN)[lag]) / sum;
            if (value(M_INF2) > 0) out[M_INF2] += double(sums.at(L_REST)[lag]) / sum;
        }
        out[MU] -= 2 * lag * e2 * d_e2 + lag * double(sums.at(L_DECAYED)[lag]);
    }
}

template <class T> class BackwardUnit : UnitData<T> {
    using Base = UnitData<T>;
    using Base::c, Base::unit, Base::heads, Base::tables, Base::magnitude, Base::documents;
    using Base::key_head, Base::key_rows, Base::value_rows;
    int64_t part, per_key_head, key_heads;  // query heads per key head; key heads of this unit
    T *turned, *d_out_turned, *own_values, *pairs, *d_pairs, *correlation, *predicted, *d_z;  // blocks
    T *q2, *d_q2, *shift, *inverse_sum, *delta, *d_evidence;  // a number per query and head
    T *m_query, *d_m_query, *cosine_scale, *d_cosine_scale, *upstream, *m_bar, *radial_log;
    T* forgotten_here;
    T *k2, *d_k2, *key_norm, *d_key_norm, *d_m;  // a number per key
    T* lags;

   public:
    BackwardUnit(const Call& call, Tables<T>& t, int64_t item) : Base(call, t, item / call.parts), part(item % call.parts) {
        per_key_head = c.heads / c.groups, key_heads = unit.heads / per_key_head;
        const int64_t n = unit.heads, block = BLOCK * BLOCK, panel = c.size * BLOCK;
        Pieces<T> pieces{scratch<T>(2 * n * panel + (n + 4) * block + c.groups * panel + (7 * n + 7) * BLOCK +
                                    (2 * key_heads + 2) * (c.keys + 16) + (n + 1) * LAG_ROWS * tables.length + 16)};
        turned = pieces.take(n * panel), d_out_turned = pieces.take(n * panel), own_values = pieces.take(c.groups * panel);
        pairs = pieces.take(n * block), d_pairs = pieces.take(block), correlation = pieces.take(block);
        predicted = pieces.take(block), d_z = pieces.take(block);
        for (T** x : {&q2, &d_q2, &shift, &inverse_sum, &delta, &d_evidence, &forgotten_here}) *x = pieces.take(n * BLOCK);
        for (T** x : {&m_query, &d_m_query, &cosine_scale, &d_cosine_scale, &upstream, &m_bar, &radial_log})
            *x = pieces.take(BLOCK);
        k2 = pieces.take(key_heads * c.keys), d_k2 = pieces.take_zeros(key_heads * c.keys);
        key_norm = pieces.take_zeros(c.keys), d_key_norm = pieces.take_zeros(c.keys);
        lags = pieces.take_zeros((n + 1) * LAG_ROWS * tables.length);
        d_m = magnitude ? (T*)c.d_magnitude + (part * c.units() + item / c.parts) * c.keys : nullptr;
        for (int64_t g = 0; g < key_heads; ++g)
            for (int64_t j = 0; j < c.keys; ++j) {
                const T norm = square_norm(key_rows(g * per_key_head, j), c.size);
                k2[g * c.keys + j] = c.dot_form ? 0 : norm, key_norm[j] += norm * T(per_key_head);
            }
        for (int64_t j = 0; j < c.keys; ++j) key_norm[j] = c.by_queries() ? inverse_root(key_norm[j]) : 1;
    }

    void run() {
        for (int64_t b = c.blocks() - 1 - part; b >= 0; b -= c.parts) queries(Queries::of<T>(c, b));
        finish();
    }

   private:
    static constexpr T ALL_WEIGHT = 1 - 4 * std::numeric_limits<T>::epsilon();
    T* key_gradient(void* base, int64_t g, int64_t j) const {
        return (T*)base + (((part * c.batch + unit.batch) * c.groups + g) * c.keys + j) * c.size;
    }
    LagSums<T> lag_sums(int64_t h) const { return {lags + h * LAG_ROWS * tables.length, tables.length}; }
    double* noise_out(int64_t h) const {
        return c.d_noise + ((part * c.batch + unit.batch) * c.heads + unit.first_head + h) * NOISE_ROWS;
    }
    double* radial_out() const { return c.d_radial + (part * c.batch + unit.batch) * RADIAL_ROWS; }

    // POWER knows no shift, and does not form the logarithm that the gradient of ν needs.
    Form form(Queries q, int64_t h) const {
        const T* of_head = shift + h * BLOCK;
        bool plain = std::all_of(of_head, of_head + q.count, [](T x) { return x == 0; });
        return heads[h].form(c, plain && !c.learns_shape);
    }

    void queries(Queries q) {
        prepare(q);
        const int64_t block = BLOCK * BLOCK, panel = c.size * BLOCK;
        for (int64_t first = 0; first < q.position + q.count; first += BLOCK) {
            const Keys k{first, std::min(BLOCK, q.position + q.count - first)};
            if (strangers<T>(documents, q, k)) continue;
            for (int64_t h = 0; h < unit.heads; ++h)
                dots<T, false>(q, k, c.size, key_rows(h, first), c.k_at.token, turned + h * panel, pairs + h * block);
            if (c.radial != OFF) this->correlate(q, k, pairs, own_values, correlation);
            if (c.radial == OWN) radial<OWN>(q, k);
            if (c.radial == SHARED) predict(q, k);
            for (int64_t h = 0; h < unit.heads; ++h) {
                const int64_t g = key_head(h);
                dots<T, false>(q, k, c.size, value_rows(g, first), c.v_at.token, d_out_turned + h * panel, d_pairs);
                with_form(form(q, h), c.decay_keys || c.decay_values,
                          [&](auto form, auto decay) { differentiate<form(), decay()>(q, k, h); });
                to_keys<T>(q, k, c.size, d_pairs, this->rows(c.d_out, c.d_out_at, q, h), c.d_out_at.token,
                           key_gradient(c.dv, g, first), c.size);
            }
            if (c.radial == SHARED) radial<SHARED>(q, k);
            if (c.radial != OFF) spread(q, k);
            for (int64_t h = 0; h < unit.heads && (c.kernel != GAUSSIAN || c.by_queries()); ++h) {
                const T* of_head = pairs + h * block;
                to_keys<T>(q, k, c.size, of_head, this->rows(c.q, c.q_at, q, h), c.q_at.token,
                           key_gradient(c.dk, key_head(h), first), c.size);
                to_queries<T>(q, k, c.size, of_head, key_rows(h, first), c.k_at.token, this->rows(c.dq, c.dq_at, q, h),
                              c.dq_at.token);
            }
        }
        finish(q);
    }

    // Everything about a block of queries that does not depend on a key.
    void prepare(Queries q) {
        for (T* x : {m_query, d_cosine_scale, d_m_query, upstream, m_bar, radial_log}) std::fill_n(x, BLOCK, T(0));
        for (T* x : {d_q2, delta, d_evidence, shift, inverse_sum}) std::fill_n(x, unit.heads * BLOCK, T(0));  // no query: weight 0
        this->measure_queries(q, turned, q2, cosine_scale, own_values);
        this->measure_forgotten(q, forgotten_here);
        for (int64_t i = 0; i < q.count && c.radial != OFF; ++i) {
            const int64_t at = unit.batch * c.queries + q.first + i;
            m_query[i] = magnitude[q.position + i];
            upstream[i] = ((const T*)c.d_m_bar)[at] / (c.radial == SHARED ? T(c.heads) : T(1));
            if (c.radial == OWN) m_bar[i] = ((const T*)c.m_bar)[at], radial_log[i] = ((const T*)c.radial_evidence)[at];
        }
        for (int64_t h = 0; h < unit.heads; ++h) {
            const T *d_out = this->rows(c.d_out, c.d_out_at, q, h), *out = this->rows((const void*)c.out, c.out_at, q, h);
            transpose(d_out, c.d_out_at.token, q.count, q.lanes, c.size, d_out_turned + h * c.size * BLOCK);
            const int64_t at = (unit.batch * c.heads + unit.first_head + h) * c.queries + q.first;
            for (int64_t i = 0; i < q.count; ++i) {
                Vec<T> sum{};
                for (int64_t d = 0; d < c.size; d += WIDTH<T>)
                    sum += load(d_out + i * c.d_out_at.token + d) * load(out + i * c.out_at.token + d);
                d_evidence[h * BLOCK + i] = ((const T*)c.d_evidence)[at + i];
                T value = total<T>(sum) - d_evidence[h * BLOCK + i];  // Σ_j A ∂A − ∂ log-evidence
                if (c.radial == SHARED) value += upstream[i] * ((const T*)c.head_m_bar)[at + i];
                delta[h * BLOCK + i] = value;
                shift[h * BLOCK + i] = ((const T*)c.shifts)[at + i];
                inverse_sum[h * BLOCK + i] = 1 / ((const T*)c.sums)[at + i];
            }
        }
    }

    // From dots and ∂A: the weights that multiply ∂O (into d_pairs) and ∂dots (into pairs), with all sums on the way.
    template <Form FORM, bool DECAY> void differentiate(Queries q, Keys k, int64_t h) {
        const Head<T> head = heads[h];
        const bool shares = c.radial == SHARED, drops = c.dropout > 0, numerator = magnitude != nullptr;
        LagSums<T> sums = lag_sums(h);
        T *lag_g = sums.at(L_G), *lag_gated = sums.at(L_GATED), *lag_rest = sums.at(L_REST), *lag_own = sums.at(L_OWN);
        T* lag_decayed = sums.at(L_DECAYED);
        const T* forgotten = this->forgotten(h);
        T* d_forgotten = (T*)c.d_forgotten + ((part * c.batch + unit.batch) * c.heads + unit.first_head + h) * c.keys;
        Vec<T> d_shape{};
        for (int64_t j = 0; j < k.count; ++j) {
            T *dot = pairs + (h * BLOCK + j) * BLOCK, *d_weight = d_pairs + j * BLOCK;
            const int64_t from = first_lane<T>(q, k.first + j), key_at = h / per_key_head * c.keys + k.first + j;
            const Key<T> key{k2[key_at], this->m2(k.first + j)};
            const T forgotten_key = forgotten ? forgotten[k.first + j] : T(0);
            Vec<T> sum_k2{}, sum_m2{}, sum_g{};
            for (int64_t i = 0; i < from; i += WIDTH<T>) store<T>(dot + i, Vec<T>{}), store<T>(d_weight + i, Vec<T>{});
            for (int64_t i = from; i < q.lanes; i += WIDTH<T>) {
                const int64_t lag = q.position + i - k.first - j;
                const Vec<T> s = load(dot + i);
                auto p = pair<T, FORM, DECAY>(head, key, s, load(q2 + h * BLOCK + i), lag);
                if (documents) p.kappa = this->same_document(q, i, k.first + j) ? p.kappa : Vec<T>{};
                Vec<T> faded{}, weight = p.kappa * load(inverse_sum + h * BLOCK + i);
                if (forgotten) faded = Base::faded(forgotten_here + h * BLOCK + i, forgotten_key);
                if constexpr (FORM == POWER) {
                    weight *= squared<T>(p.inverse, head.squarings);
                    if (forgotten) weight *= exp2<T>(faded);
                } else {
                    weight *= exp2<T>(p.log2_weight + faded - load(shift + h * BLOCK + i));
                }
                Vec<T> d_applied = load(d_weight + i), applied = weight;
                if (DECAY) applied *= load(head.value_decay + lag);
                if (drops) applied *= kept<T>(c, unit.batch, unit.first_head + h, q.position + i, k.first + j);
                store<T>(d_weight + i, applied);
                const Vec<T> through_values = applied * d_applied;
                Vec<T> g = through_values - weight * load(delta + h * BLOCK + i);
                if (shares) {
                    Vec<T> up = weight * load(upstream + i);
                    g += up * load(predicted + j * BLOCK + i);
                    add_to<T>(d_z + j * BLOCK + i, up);
                }
                // A key that has all the weight: ∂A − Σ A ∂A is exactly 0, but the difference of two roundings here,
                // which an exponential kernel (no robust weight holds its slope down) multiplies by κ̃.
                if (FORM == EXPONENT) g = weight >= all<T>(ALL_WEIGHT) ? load(d_evidence + h * BLOCK + i) : g;
                const Vec<T> slope = FORM == EXPONENT ? g : g * (head.exponent * p.inverse);  // −∂/∂y
                const Vec<T> by_y = slope * p.y;
                if (FORM == EXPONENT) d_shape += by_y;
                if (FORM == POWER_LAW) d_shape += by_y + g * p.log2_weight * (T(LN2) * head.shape / head.exponent);
                const Vec<T> d_r2 = p.r2 >= all<T>(head.least) ? -slope * p.capped : Vec<T>{};
                const Vec<T> gated = p.free <= all<T>(head.cap) ? by_y : Vec<T>{};
                add_to<T>(d_q2 + h * BLOCK + i, d_r2);
                add_to<T>(lag_g + lag, g);
                sum_g += g;
                add_to<T>(lag_gated + lag, gated);
                if (numerator) {
                    const Vec<T> rest = (g - gated) / p.n;
                    sum_m2 += rest * load(head.own + lag);
                    add_to<T>(lag_rest + lag, rest);
                    add_to<T>(lag_own + lag, rest * key.m2);
                }
                if (DECAY) {
                    const Vec<T> e = load(head.key_decay + lag), d_dot = d_r2 * e;
                    sum_k2 += d_dot * e;
                    store<T>(dot + i, T(-2) * d_dot);
                    Vec<T> decayed = c.decay_values ? through_values : Vec<T>{};
                    if (c.decay_keys) decayed += T(2) * d_dot * (e * key.k2 - s);
                    add_to<T>(lag_decayed + lag, decayed);
                } else {
                    sum_k2 += d_r2;
                    store<T>(dot + i, T(-2) * d_r2);
                }
            }
            d_k2[key_at] += total<T>(sum_k2);
            if (forgotten) d_forgotten[k.first + j] -= total<T>(sum_g);
            if (magnitude && magnitude[k.first + j] >= T(c.least_magnitude)) d_m[k.first + j] += 2 * magnitude[k.first + j] * total<T>(sum_m2);
        }
        noise_out(h)[SHAPE] += double(total<T>(d_shape)) / double(head.shape);
    }

    // `shared`: z = c·m̂ of every pair, and an empty sum for ∂z.
    void predict(Queries q, Keys k) {
        const RadialHead<T> head(c, tables);
        for (int64_t j = 0; j < k.count; ++j)
            for (int64_t i = first_lane<T>(q, k.first + j); i < q.lanes; i += WIDTH<T>) {
                auto p = radial_pair<T>(head, magnitude[k.first + j], load(correlation + j * BLOCK + i),
                                        key_norm[k.first + j] * load(cosine_scale + i), load(m_query + i),
                                        q.position + i - k.first - j);
                store<T>(predicted + j * BLOCK + i, p.z);
                store<T>(d_z + j * BLOCK + i, Vec<T>{});
            }
    }

    // Gradients through z = c·m̂; leaves ∂correlation in d_z, zero where nothing is seen.
    template <Radial MODE> void radial(Queries q, Keys k) {
        const RadialHead<T> head(c, tables);
        LagSums<T> sums = lag_sums(unit.heads);
        Vec<T> d_nu{};
        for (int64_t j = 0; j < k.count; ++j) {
            const T m_key = magnitude[k.first + j], key_scale = key_norm[k.first + j];
            Vec<T> sum_m{}, sum_norm{};
            const int64_t from = first_lane<T>(q, k.first + j);
            for (int64_t i = 0; i < from; i += WIDTH<T>) store<T>(d_z + j * BLOCK + i, Vec<T>{});
            for (int64_t i = from; i < q.lanes; i += WIDTH<T>) {
                const int64_t lag = q.position + i - k.first - j;
                const Vec<T> raw = load(correlation + j * BLOCK + i), scale = key_scale * load(cosine_scale + i);
                auto p = radial_pair<T>(head, m_key, raw, scale, load(m_query + i), lag);
                Vec<T> through_z;
                if constexpr (MODE == OWN) {
                    if (documents) p.log2_weight = this->same_document(q, i, k.first + j) ? p.log2_weight : all<T>(NEVER);
                    const Vec<T> weight = exp2<T>(p.log2_weight - load(radial_log + i)) * load(upstream + i);
                    const Vec<T> g = weight * (p.z - load(m_bar + i));
                    const Vec<T> slope = g * (head.exponent * p.inverse), by_y = slope * p.y;
                    const Vec<T> d_residual = T(-2) * slope * load(head.k2 + lag) * p.residual;
                    through_z = weight + d_residual;
                    add_to<T>(d_m_query + i, -d_residual);
                    add_to<T>(sums.at(L_G) + lag, g);
                    add_to<T>(sums.at(L_GATED) + lag, by_y);
                    d_nu += by_y - g * log2_1p<T>(p.y, p.inverse) * (T(LN2) * head.shape);
                } else {
                    through_z = load(d_z + j * BLOCK + i);
                }
                add_to<T>(sums.at(L_DECAYED) + lag, through_z * p.z);
                const Vec<T> e = load(head.key_decay + lag), d_cosine = through_z * e * m_key;
                sum_m += through_z * p.cosine * e;
                if (c.by_queries()) {
                    sum_norm += d_cosine * raw * load(cosine_scale + i);
                    add_to<T>(d_cosine_scale + i, d_cosine * raw * key_scale);
                }
                store<T>(d_z + j * BLOCK + i, d_cosine * scale);
            }
            d_m[k.first + j] += total<T>(sum_m), d_key_norm[k.first + j] += total<T>(sum_norm);
        }
        if (MODE == OWN) radial_out()[R_NU] += double(total<T>(d_nu)) / double(head.shape);
    }

    // ∂correlation -> dots of every head, or the values.
    void spread(Queries q, Keys k) {
        const int64_t block = BLOCK * BLOCK;
        if (c.by_queries()) {
            for (int64_t h = 0; h < unit.heads; ++h)
                for (int64_t j = 0; j < k.count; ++j)
                    for (int64_t i = first_lane<T>(q, k.first + j); i < q.lanes; i += WIDTH<T>)
                        add_to<T>(pairs + h * block + j * BLOCK + i, load(d_z + j * BLOCK + i));
            return;
        }
        for (int64_t g = 0; c.by_values() && g < c.groups; ++g) {
            to_keys<T>(q, k, c.size, d_z, value_rows(g, q.position), c.v_at.token, key_gradient(c.dv, g, k.first), c.size);
            to_queries<T>(q, k, c.size, d_z, value_rows(g, k.first), c.v_at.token, key_gradient(c.dv, g, q.position), c.size);
        }
    }

    // ∂‖q‖² of the block reaches q.
    void finish(Queries q) {
        for (int64_t h = 0; h < unit.heads; ++h)
            for (int64_t i = 0; i < q.count; ++i) {
                const T r = cosine_scale[i], by_norm = c.by_queries() ? T(-0.5) * d_cosine_scale[i] * r * r * r : 0;
                const T by_q2 = 2 * ((c.dot_form ? 0 : d_q2[h * BLOCK + i]) + by_norm);
                const T* row = this->rows(c.q, c.q_at, q, h) + i * c.q_at.token;
                T* out = this->rows(c.dq, c.dq_at, q, h) + i * c.dq_at.token;
                for (int64_t d = 0; d < c.size; ++d) out[d] += by_q2 * row[d];
            }
        for (int64_t i = 0; i < q.count && c.radial == OWN; ++i) d_m[q.position + i] += d_m_query[i];
    }

    // ∂‖k‖² of all keys reaches k, and the sums by lag become gradients of the noise.
    void finish() {
        for (int64_t g = 0; g < key_heads; ++g)
            for (int64_t j = 0; j < c.keys; ++j) {
                const T r = key_norm[j], by_norm = c.by_queries() ? T(-0.5) * d_key_norm[j] * r * r * r * T(per_key_head) : 0;
                const T by_k2 = 2 * ((c.dot_form ? 0 : d_k2[g * c.keys + j]) + by_norm);
                const T* row = key_rows(g * per_key_head, j);
                T* out = key_gradient(c.dk, key_head(g * per_key_head), j);
                for (int64_t d = 0; d < c.size; ++d) out[d] += by_k2 * row[d];
            }
        for (int64_t h = 0; h < unit.heads; ++h)
            noise_gradient(lag_sums(h), c.keys, c.noise + unit.first_head + h, c.heads, magnitude != nullptr, noise_out(h));
        if (c.radial == OFF) return;
        const double* n = c.radial_noise;
        double as_noise[NOISE_ROWS] = {n[R_MU], n[R_ETA_K2], n[R_ETA_Q2], n[R_SIGMA02], 0, 0, 1}, found[NOISE_ROWS] = {};
        noise_gradient(lag_sums(unit.heads), c.keys, as_noise, 1, false, found);
        const int from[] = {MU, ETA_K2, ETA_Q2, SIGMA02};
        for (int r = 0; r < R_NU; ++r) radial_out()[r] += found[from[r]];
    }
};
