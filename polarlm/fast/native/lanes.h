// Vectors of the machine's width (GCC and Clang vector extensions), and 2^x and log2 x on them to the last bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Int;
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int mantissa = 23, exp_terms = 7, log_terms = 5;
    static constexpr float round = 12582912.0f, lowest = -126.0f, highest = 127.0f;  // round: 1.5·2^23
    static constexpr Int half_root = 0x3f3504f3, bias = 127;                         // half_root: the bits of √½
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Int;
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int mantissa = 52, exp_terms = 13, log_terms = 11;
    static constexpr double round = 6755399441055744.0, lowest = -1022.0, highest = 1023.0;  // round: 1.5·2^52
    static constexpr Int half_root = 0x3fe6a09e667f3bcd, bias = 1023;
};

template <class T> using Vec = typename Lanes<T>::V;
template <class T> using IntVec = typename Lanes<T>::I;
template <class T> constexpr int WIDTH = VECTOR_BYTES / sizeof(T);
constexpr double LN2 = 0.69314718055994530942, LOG2E = 1.44269504088896340736;

template <class T> inline Vec<T> load(const T* p) {
    Vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T> inline void store(T* p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }
template <class T> inline void add_to(T* p, Vec<T> v) { store<T>(p, load(p) + v); }
template <class T> inline Vec<T> all(T x) { return Vec<T>{} + x; }
template <class V> inline V smaller(V a, V b) { return a < b ? a : b; }
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
template <class T> inline T total(Vec<T> v) {
    T part[WIDTH<T>];
    store<T>(part, v);
    for (int half = WIDTH<T> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
}

// 2^x: Taylor series of the fraction in [−½, ½]; exactly 0 below the normal range, capped at 2^127 (2^1023).
template <class T> inline Vec<T> exp2(Vec<T> x) {
    using L = Lanes<T>;
    Vec<T> clamped = smaller(larger(x, all<T>(L::lowest)), all<T>(L::highest));
    Vec<T> shifted = clamped + L::round;
    Vec<T> f = (clamped - (shifted - L::round)) * T(LN2);
    IntVec<T> n = (IntVec<T>)shifted;  // its low bits are the nearest whole number
    Vec<T> r = all<T>(1);
#pragma GCC unroll 16
    for (int term = L::exp_terms; term > 0; --term) r = r * (f * T(1.0 / term)) + T(1);
    IntVec<T> scale = (n + L::bias) << L::mantissa;
    return x < all<T>(L::lowest) ? all<T>(0) : r * (Vec<T>)scale;
}

// log2 x for normal x > 0: x = 2^e m, m in [√½, √2), log m = 2 artanh((m−1)/(m+1)).
template <class T> inline Vec<T> log2(Vec<T> x) {
    using L = Lanes<T>;
    IntVec<T> bits = (IntVec<T>)x, e = (bits - L::half_root) >> L::mantissa;
    Vec<T> m = (Vec<T>)(bits - (e << L::mantissa));
    Vec<T> s = (m - T(1)) / (m + T(1)), z = s * s;
    Vec<T> r = all<T>(T(1) / (2 * L::log_terms + 1));
#pragma GCC unroll 16
    for (int term = L::log_terms - 1; term >= 0; --term) r = r * z + T(1.0 / (2 * term + 1));
    return __builtin_convertvector(e, Vec<T>) + s * r * T(2 * LOG2E);
}

// log2(1+y), y ≥ 0, given u = 1/(1+y): the logarithm plus what rounding 1+y lost.
template <class T> inline Vec<T> log2_1p(Vec<T> y, Vec<T> u) {
    Vec<T> t = y + T(1);
    return log2<T>(t) + (y - (t - T(1))) * u * T(LOG2E);
}
