// A whole pre-norm layer for one new token per row: norm, projections, heads (decode.h), W_o, norm, feed-forward.
#pragma once
#include "decode.h"

struct Layer {
    const Decode* heads;
    int64_t rows, width, hidden, gated, threads;  // gated: SwiGLU, whose `up` holds the gate and then the other half
    int64_t across[2];                            // whether the heads' and the feed-forward's step goes across the stream
    int64_t outputs[2];                           // of the projections, which write q, k and v side by side
    double eps;
    const void *projections[2], *out, *up, *down, *norms[2];  // matrices (outputs, inputs); gains
    const void *gate, *gate_offset;  // of forgetting: (heads,width) or null, (heads)
    void *x, *memory;                                         // the stream (rows,width), overwritten; scratch
};

// y += W x (or = W x) for four outputs and up to R rows; inputs in whole vectors.
template <class T, int R = 4>
inline void four_outputs(int64_t rows, const T* w, int64_t inputs, const T* x, int64_t x_row, T* y, int64_t y_row, bool add) {
    if constexpr (R > 1)
        if (rows < R) return four_outputs<T, R - 1>(rows, w, inputs, x, x_row, y, y_row, add);
    Vec<T> sum[4][R] = {};
    for (int64_t i = 0; i < inputs; i += WIDTH<T>) {
        Vec<T> at[R];
        for (int r = 0; r < R; ++r) at[r] = load(x + r * x_row + i);
        for (int o = 0; o < 4; ++o) {
            const Vec<T> weight = load(w + o * inputs + i);
            for (int r = 0; r < R; ++r) sum[o][r] += weight * at[r];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < 4; ++o) y[r * y_row + o] = total<T>(sum[o][r]) + (add ? y[r * y_row + o] : T(0));
}

template <class T, class Share>
void apply(Share share, const void* matrix, int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t x_row, T* y,
           int64_t y_row, bool add) {
    constexpr int64_t SOME = 64;  // outputs of a task: their weights stay in the cache for the next rows
    share((outputs + SOME - 1) / SOME, outputs * inputs * rows, [&](int64_t item) {
        for (int64_t row = 0; row < rows; row += 4)
            for (int64_t o = item * SOME; o < std::min(outputs, (item + 1) * SOME); o += 4)
                four_outputs(rows - row, (const T*)matrix + o * inputs, inputs, x + row * x_row, x_row, y + row * y_row + o,
                             y_row, add);
    });
}

// `share(items, multiply-adds, work)` runs work(item) for all items, by several threads where that is worth it.
template <class T, class Share> void layer(const Layer& l, Share share) {
    const Call& c = l.heads->call;
    const int64_t inner = c.heads * c.size, projected = inner + 2 * c.groups * c.size, up = l.hidden * (1 + l.gated);
    T *x = (T*)l.x, *normed = (T*)l.memory, *qkv = normed + l.rows * l.width, *estimates = qkv + l.rows * projected;
    T *before = estimates + l.rows * inner, *after = before + l.rows * up, *log_forget = after + l.rows * l.hidden;
    auto norm = [&](int which) {
        for (int64_t row = 0; row < l.rows; ++row)
            normed_row(x + row * l.width, (const T*)l.norms[which], l.width, T(l.eps), normed + row * l.width);
    };
    norm(0);
    for (int64_t i = 0, at = 0; i < 2; at += l.outputs[i++])
        apply(share, l.projections[i], l.rows, l.outputs[i], l.width, normed, l.width, qkv + at, projected, false);
    Decode heads = *l.heads;
    heads.q = qkv, heads.k = qkv + inner, heads.v = qkv + inner + c.groups * c.size;
    heads.token_row = projected;
    for (int64_t row = 0; heads.forgotten && row < l.rows; ++row)
        for (int64_t h = 0; h < c.heads; ++h) {
            Vec<T> sum{};
            for (int64_t i = 0; l.gate && i < l.width; i += WIDTH<T>)
                sum += load((const T*)l.gate + h * l.width + i) * load(normed + row * l.width + i);
            const T z = total<T>(sum) + ((const T*)l.gate_offset)[h];
            log_forget[row * c.heads + h] = std::min(z, T(0)) - std::log1p(std::exp(-std::fabs(z)));
        }
    heads.log_forget = log_forget;
    share(l.rows, l.rows * c.keys * inner,
          [&](int64_t row) { DecodeRow<T>(heads, row).run(estimates + row * inner); });
    auto add = [&](const void* matrix, int64_t inputs, const T* from, bool across) {
        apply(share, matrix, l.rows, l.width, inputs, from, inputs, across ? normed : x, l.width, !across);
        for (int64_t row = 0; row < l.rows && across; ++row)
            add_across(x + row * l.width, normed + row * l.width, l.width, x + row * l.width);
    };
    add(l.out, inner, estimates, l.across[0]);
    norm(1);
    apply(share, l.up, l.rows, up, l.width, normed, l.width, before, up, false);
    for (int64_t row = 0; row < l.rows; ++row)
        for (int64_t i = 0; i < l.hidden; i += WIDTH<T>) {
            Vec<T> bell, g = load(before + row * up + i);
            store<T>(after + row * l.hidden + i,
                     l.gated ? g * sigmoid<T>(g) * load(before + row * up + l.hidden + i) : g * normal<T>(g, bell));
        }
    add(l.down, l.hidden, after, l.across[1]);
}
