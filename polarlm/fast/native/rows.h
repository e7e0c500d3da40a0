// Rotation, normalisation and gating of rows of channels, each one pass over memory, and the way back.
// A row is one head of one token: rows are addressed by (batch, head, token) with any strides, channels lie side by side.
#pragma once
#include "call.h"

struct Operand {
    void* at;
    Strides stride;
    template <class T> T* row(int64_t b, int64_t h, int64_t t) const {
        return static_cast<T*>(at) + b * stride.batch + h * stride.head + t * stride.token;
    }
};

struct Operands {
    int64_t batch, heads, tokens, channels, threads;
    int64_t mode;  // of spheres: 1 where a token's heads are one row, and not each by itself; of tangents: the projection
    Operand x, y, cos, sin, rms, d_y, d_rms, d_x, other, d_other;  // what an operation does not use is null
    Operand evidence, change, d_evidence, d_change;
    void* total;  // what is summed over all rows
};
struct Rows : Operands {
    double radius, eps;

    static constexpr int64_t CHUNK = 64;  // tokens of a task
    int64_t chunks() const { return (tokens + CHUNK - 1) / CHUNK; }
};

// y = x turned by (cos, sin), channel i paired with i + half; with `sign` −1 turned back. In place, if x is y.
template <class T> inline void turned(const T* x, const T* cos, const T* sin, T sign, int64_t half, T* y) {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
        const T real = x[i], imaginary = x[half + i], s = sign * sin[i];
        y[i] = real * cos[i] - imaginary * s;
        y[half + i] = imaginary * cos[i] + real * s;
    }
}
template <class T> void rotate_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    turned(r.x.row<T>(b, h, t), r.cos.row<T>(b, h, t), r.sin.row<T>(b, h, t), T(r.radius), r.channels / 2,
           r.y.row<T>(b, h, t));
}

// y = x·radius/rms; returns rms = √(mean x² + eps).
template <class T> inline T to_sphere(const T* x, int64_t channels, T radius, T eps, T* y) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < channels; ++i) sum += x[i] * x[i];
    const T rms = std::sqrt(sum / T(channels) + eps), scale = radius / rms;
#pragma GCC ivdep
    for (int64_t i = 0; i < channels; ++i) y[i] = x[i] * scale;
    return rms;
}
template <class T> void sphere_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    *r.rms.row<T>(b, h, t) =
        to_sphere(r.x.row<T>(b, h, t), r.channels, T(r.radius), T(r.eps), r.y.row<T>(b, h, t));
}

// With s = radius/rms: dx = s ∂y + x (∂rms − s⟨∂y,x⟩/rms)/(n rms); adds the row's share of ∂radius.
template <class T> void sphere_back_row(const Rows& r, int64_t b, int64_t h, int64_t t, double* d_radius) {
    const T *x = r.x.row<T>(b, h, t), *d_y = r.d_y.row<T>(b, h, t);
    T along = 0, *d_x = r.d_x.row<T>(b, h, t);
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < r.channels; ++i) along += x[i] * d_y[i];
    const T rms = *r.rms.row<T>(b, h, t), scale = T(r.radius) / rms;
    const T d_rms = r.d_rms.at ? *r.d_rms.row<T>(b, h, t) : T(0);
    const T outward = (d_rms - scale * along / rms) / (T(r.channels) * rms);
#pragma GCC ivdep
    for (int64_t i = 0; i < r.channels; ++i) d_x[i] = d_y[i] * scale + x[i] * outward;
    *d_radius += double(along / rms);
}

// The same where x was turned after it, from the result y = R s x itself: dx = R⁻¹(s ∂y + y (∂rms − ⟨∂y,y⟩/rms)/(n s rms)).
template <class T> void turned_sphere_back_row(const Rows& r, int64_t b, int64_t h, int64_t t, double* d_radius) {
    if (r.mode && h) return;
    const int64_t end = r.mode ? r.heads : h + 1, half = r.channels / 2;
    T along = 0;
    for (int64_t head = h; head < end; ++head) {
        const T *y = r.x.row<T>(b, head, t), *d_y = r.d_y.row<T>(b, head, t);
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < r.channels; ++i) along += y[i] * d_y[i];
    }
    const T rms = *r.rms.row<T>(b, h, t), s = T(r.radius) / rms;
    const T d_rms = r.d_rms.at ? *r.d_rms.row<T>(b, h, t) : T(0);
    const T outward = (d_rms - along / rms) / (T(r.channels * (end - h)) * rms * s);
    for (int64_t head = h; head < end; ++head) {
        const T *y = r.x.row<T>(b, head, t), *d_y = r.d_y.row<T>(b, head, t);
        const T *cos = r.cos.row<T>(b, head, t), *sin = r.sin.row<T>(b, head, t);
        T* d_x = r.d_x.row<T>(b, head, t);
#pragma GCC ivdep
        for (int64_t i = 0; i < half; ++i) {
            const T real = d_y[i] * s + y[i] * outward, imaginary = d_y[half + i] * s + y[half + i] * outward;
            d_x[i] = real * cos[i] + imaginary * sin[i];
            d_x[half + i] = imaginary * cos[i] - real * sin[i];
        }
    }
    *d_radius += double(along) / r.radius;
}

// What a token's estimates x_h (one per head) lose along its own values v_h: lost_h v_h, by one of four projections.
enum Projection : int64_t { NONE, PER_HEAD, GLOBAL, EVIDENCE };

template <class T> struct Tangent {
    std::vector<T> along, square, evidence, lost;  // ⟨v,x⟩, ⟨v,v⟩ and log-evidence of every head; what it loses
    std::vector<T> unit, share;                    // the lost share of ⟨v, x−v⟩ over ⟨v,v⟩, and that share
    T off = 0;                                     // ⟨v, x−v⟩ over all heads
    int64_t surest = 0;

    static Tangent& of(int64_t heads) {
        thread_local Tangent tangent;
        for (auto* x : {&tangent.along, &tangent.square, &tangent.evidence, &tangent.lost, &tangent.unit, &tangent.share})
            x->resize(heads);
        return tangent;
    }
    static T held(T square) { return std::max(square, std::sqrt(std::numeric_limits<T>::min())); }  // zero: no direction
    static T sum(const std::vector<T>& x) { return std::accumulate(x.begin(), x.end(), T(0)); }

    // `clamp` (nats, none if negative): no head counts as having less evidence than the surest one by more than that.
    T known(int64_t h, double clamp) const {
        return clamp >= 0 ? std::max(evidence[h], evidence[surest] - T(clamp)) : evidence[h];
    }
    void find(int64_t projection, double clamp) {
        const int64_t n = along.size();
        if (projection == NONE) unit.assign(n, T(0)), lost.assign(n, T(0));
        for (int64_t h = 0; h < n && projection == PER_HEAD; ++h) lost[h] = along[h] / held(square[h]);
        if (projection == GLOBAL) {
            unit.assign(n, 1 / held(sum(square)));
            lost.assign(n, sum(along) / held(sum(square)));
        }
        if (projection != EVIDENCE) return;
        surest = std::max_element(evidence.begin(), evidence.end()) - evidence.begin();
        T top = -HUGE_VAL, total = 0;
        off = 0;
        for (int64_t h = 0; h < n; ++h) {
            off += along[h] - square[h];
            share[h] = square[h] < held(square[h]) ? std::numeric_limits<T>::lowest() : std::log(square[h]) - known(h, clamp);
            top = std::max(top, share[h]);
        }
        for (T& x : share) total += x = std::exp(x - top);
        for (int64_t h = 0; h < n; ++h) {
            share[h] /= total, unit[h] = share[h] / held(square[h]);
            lost[h] = 1 + off * share[h] / held(square[h]);
        }
    }
};

template <class T> inline void inner(const T* v, const T* x, int64_t channels, T& dot, T& square) {
    T by_x = 0, by_v = 0;
#pragma omp simd reduction(+ : by_x, by_v)
    for (int64_t i = 0; i < channels; ++i) {
        by_x += v[i] * x[i];
        by_v += v[i] * v[i];
    }
    dot = by_x, square = by_v;
}
template <class T> Tangent<T>& tangent_of(const Rows& r, int64_t b, int64_t t) {
    Tangent<T>& tangent = Tangent<T>::of(r.heads);
    for (int64_t h = 0; h < r.heads; ++h) {
        inner(r.other.row<T>(b, h, t), r.x.row<T>(b, h, t), r.channels, tangent.along[h], tangent.square[h]);
        if (r.evidence.at) tangent.evidence[h] = *r.evidence.row<T>(b, h, t);
    }
    tangent.find(r.mode, r.eps);
    return tangent;
}

// y = R⁻¹((x − lost v)·radius + change v), v being `other`: a step across a token's value, one along it, turned back.
template <class T> void tangent_row(const Rows& r, int64_t b, int64_t first, int64_t t) {
    if (first) return;  // the first head's row is all of the token's
    const Tangent<T>& tangent = tangent_of<T>(r, b, t);
    const T scale = T(r.radius), change = r.change.at ? *r.change.row<T>(b, 0, t) : T(0);
    const int64_t half = r.channels / 2;
    for (int64_t h = 0; h < r.heads; ++h) {
        const T *x = r.x.row<T>(b, h, t), *v = r.other.row<T>(b, h, t), lost = tangent.lost[h];
        const T *cos = r.cos.row<T>(b, h, t), *sin = r.sin.row<T>(b, h, t);
        T* y = r.y.row<T>(b, h, t);
#pragma GCC ivdep
        for (int64_t i = 0; i < half; ++i) {
            const T real = (x[i] - v[i] * lost) * scale + change * v[i];
            const T imaginary = (x[half + i] - v[half + i] * lost) * scale + change * v[half + i];
            y[i] = real * cos[i] + imaginary * sin[i];
            y[half + i] = imaginary * cos[i] - real * sin[i];
        }
    }
}

// With d = R∂y, p = ⟨v,d⟩ and c = Σ_k p_k ∂lost_k/∂⟨v,x⟩, which is the same for all heads but in PER_HEAD:
// dx = (d − c v)·radius, dv = (2 lost c v − c x − lost d)·radius + change d, ∂change = Σ p. The derivative of lost by
// ⟨v,v⟩ is −lost times that by ⟨v,x⟩ in every projection.
template <class T> void tangent_back_row(const Rows& r, int64_t b, int64_t first, int64_t t) {
    if (first) return;
    const Tangent<T>& tangent = tangent_of<T>(r, b, t);
    const T scale = T(r.radius), change = r.change.at ? *r.change.row<T>(b, 0, t) : T(0);
    thread_local std::vector<T> p;
    p.resize(r.heads);
    T all = 0, everywhere = 0, square;
    for (int64_t h = 0; h < r.heads; ++h) {
        T* d = r.d_x.row<T>(b, h, t);
        turned(r.d_y.row<T>(b, h, t), r.cos.row<T>(b, h, t), r.sin.row<T>(b, h, t), T(1), r.channels / 2, d);
        inner(r.other.row<T>(b, h, t), d, r.channels, p[h], square);
        all += p[h], everywhere += p[h] * tangent.unit[h];
    }
    for (int64_t h = 0; h < r.heads; ++h) {
        const T *x = r.x.row<T>(b, h, t), *v = r.other.row<T>(b, h, t);
        T *d_x = r.d_x.row<T>(b, h, t), *d_v = r.d_other.row<T>(b, h, t);
        const T a = tangent.lost[h], c = r.mode == PER_HEAD ? p[h] / tangent.held(tangent.square[h]) : everywhere;
#pragma GCC ivdep
        for (int64_t i = 0; i < r.channels; ++i) {
            const T d = d_x[i];
            d_x[i] = (d - c * v[i]) * scale;
            d_v[i] = (2 * a * c * v[i] - c * x[i] - a * d) * scale + change * d;
        }
    }
    if (r.change.at) *r.d_change.row<T>(b, 0, t) = all;
    if (r.mode != EVIDENCE) return;
    for (int64_t h = 0; h < r.heads; ++h) *r.d_evidence.row<T>(b, h, t) = 0;
    for (int64_t h = 0; h < r.heads; ++h) {  // a head held up by the clamp has the surest one's evidence
        const bool own = tangent.known(h, r.eps) == tangent.evidence[h];
        *r.d_evidence.row<T>(b, own ? h : tangent.surest, t) +=
            scale * tangent.off * (p[h] * tangent.unit[h] - everywhere * tangent.share[h]);
    }
}

// y = x + s − a x with a = ⟨x,s⟩/⟨x,x⟩: the stream x after a step s that has lost its part along it. In place, if x is y.
template <class T> inline void add_across(const T* x, const T* s, int64_t channels, T* y) {
    T along, square;
    inner(x, s, channels, along, square);
    const T kept = 1 - along / Tangent<T>::held(square);
#pragma GCC ivdep
    for (int64_t i = 0; i < channels; ++i) y[i] = x[i] * kept + s[i];
}
template <class T> void across_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    add_across(r.x.row<T>(b, h, t), r.other.row<T>(b, h, t), r.channels, r.y.row<T>(b, h, t));
}

// With b = ⟨x,∂y⟩/⟨x,x⟩: ds = ∂y − b x, dx = (1 − a) ∂y − b s + 2ab x.
template <class T> void across_back_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    const T *x = r.x.row<T>(b, h, t), *s = r.other.row<T>(b, h, t), *d_y = r.d_y.row<T>(b, h, t);
    T *d_x = r.d_x.row<T>(b, h, t), *d_s = r.d_other.row<T>(b, h, t), by_step, by_y, square;
    inner(x, s, r.channels, by_step, square);
    inner(x, d_y, r.channels, by_y, square);
    const T lost = by_step / Tangent<T>::held(square), back = by_y / Tangent<T>::held(square);
#pragma GCC ivdep
    for (int64_t i = 0; i < r.channels; ++i) {
        d_x[i] = (1 - lost) * d_y[i] - back * (s[i] - 2 * lost * x[i]);
        d_s[i] = d_y[i] - back * x[i];
    }
}

// y = x·gain/rms; returns rms.
template <class T> inline T normed_row(const T* x, const T* gain, int64_t channels, T eps, T* y) {
    const T rms = to_sphere(x, channels, T(1), eps, y);
#pragma GCC ivdep
    for (int64_t i = 0; i < channels; ++i) y[i] *= gain[i];
    return rms;
}
template <class T> void norm_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    *r.rms.row<T>(b, h, t) =
        normed_row(r.x.row<T>(b, h, t), r.other.row<T>(b, h, t), r.channels, T(r.eps), r.y.row<T>(b, h, t));
}

// dx = (gain ∂y − x ⟨gain ∂y, x⟩/(n rms²))/rms; adds the row's share of ∂gain = ∂y x/rms to `d_gain`.
template <class T> void norm_back_row(const Rows& r, int64_t b, int64_t h, int64_t t, T* d_gain) {
    const T *x = r.x.row<T>(b, h, t), *d_y = r.d_y.row<T>(b, h, t), *gain = r.other.row<T>(b, h, t);
    T along = 0, *d_x = r.d_x.row<T>(b, h, t);
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < r.channels; ++i) along += x[i] * d_y[i] * gain[i];
    const T scale = 1 / *r.rms.row<T>(b, h, t), outward = along * scale * scale / T(r.channels);
#pragma GCC ivdep
    for (int64_t i = 0; i < r.channels; ++i) {
        d_gain[i] += d_y[i] * x[i] * scale;
        d_x[i] = (d_y[i] * gain[i] - x[i] * outward) * scale;
    }
}

// SwiGLU: y = u·g·σ(g), where a row of x holds the gate g and then u; `channels` (whole vectors) counts those of y.
template <class T> inline Vec<T> sigmoid(Vec<T> x) { return T(1) / (T(1) + exp2<T>(x * T(-LOG2E))); }

template <class T> void gate_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    const T *gate = r.x.row<T>(b, h, t), *up = gate + r.channels;
    T* y = r.y.row<T>(b, h, t);
    for (int64_t i = 0; i < r.channels; i += WIDTH<T>) {
        const Vec<T> g = load(gate + i);
        store<T>(y + i, g * sigmoid<T>(g) * load(up + i));
    }
}

template <class T> void gate_back_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    const T *gate = r.x.row<T>(b, h, t), *up = gate + r.channels, *d_y = r.d_y.row<T>(b, h, t);
    T* d_x = r.d_x.row<T>(b, h, t);
    for (int64_t i = 0; i < r.channels; i += WIDTH<T>) {
        const Vec<T> g = load(gate + i), s = sigmoid<T>(g), d = load(d_y + i);
        store<T>(d_x + i, d * load(up + i) * s * (T(1) + g * (T(1) - s)));
        store<T>(d_x + r.channels + i, d * g * s);
    }
}

// Φ(x) and e^(−x²/2) of the normal distribution; the tail by Abramowitz and Stegun 7.1.26, whose error (7.5e−8 of Φ) is
// that of torch's own vectors.
template <class T> inline Vec<T> normal(Vec<T> x, Vec<T>& bell) {
    const Vec<T> far = x < T(0) ? -x : x, t = T(1) / (T(1) + far * T(0.3275911 * 0.70710678118654752));
    bell = exp2<T>(x * x * T(-0.5 * LOG2E));
    Vec<T> tail = all<T>(T(1.061405429));
    for (const double a : {-1.453152027, 1.421413741, -0.284496736, 0.254829592}) tail = tail * t + T(a);
    tail *= t * bell * T(0.5);
    return x < T(0) ? tail : T(1) - tail;
}

// GELU: y = x·Φ(x), ∂x = ∂y (Φ(x) + x e^(−x²/2)/√2π)
template <class T> void gelu_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    const T* x = r.x.row<T>(b, h, t);
    T* y = r.y.row<T>(b, h, t);
    for (int64_t i = 0; i < r.channels; i += WIDTH<T>) {
        Vec<T> bell, v = load(x + i);
        store<T>(y + i, v * normal<T>(v, bell));
    }
}

template <class T> void gelu_back_row(const Rows& r, int64_t b, int64_t h, int64_t t) {
    const T *x = r.x.row<T>(b, h, t), *d_y = r.d_y.row<T>(b, h, t);
    T* d_x = r.d_x.row<T>(b, h, t);
    for (int64_t i = 0; i < r.channels; i += WIDTH<T>) {
        Vec<T> bell, v = load(x + i), below = normal<T>(v, bell);
        store<T>(d_x + i, load(d_y + i) * (below + v * bell * T(0.39894228040143268)));
    }
}

// `row` on all rows of task `item`, heads innermost as they lie in memory.
template <class Row> void each_row(const Rows& r, int64_t item, Row row) {
    const int64_t b = item / r.chunks(), first = item % r.chunks() * Rows::CHUNK;
    for (int64_t t = first; t < std::min(first + Rows::CHUNK, r.tokens); ++t)
        for (int64_t h = 0; h < r.heads; ++h) row(b, h, t);
}
