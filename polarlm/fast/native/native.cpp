// Robust attention for CPUs: both passes as one parallel loop each, called from Python with raw pointers (native.py).
// Compiled once for REAL=float and, where somebody asks for it, once for REAL=double.
#include "backward.h"
#include "layer.h"

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel of the runtime torch uses

template <class Work> struct Crew {
    Work work;
    int64_t items;
    std::atomic<int64_t> next{0};
    // Whoever is free takes the next item, so a thread that the system has put aside delays one item only.
    static void join(void* self) {
        auto& crew = *static_cast<Crew*>(self);
        for (int64_t item; (item = crew.next.fetch_add(1)) < crew.items;) crew.work(item);
    }
};

template <class Work> void share(Parallel parallel, int64_t threads, int64_t items, Work work) {
    Crew<Work> crew{work, items};
    threads = std::min(threads, items);
    threads > 1 && parallel ? parallel(&crew.join, &crew, unsigned(threads), 0) : crew.join(&crew);
}

template <class T> void forward(const Call& call, Parallel parallel) {
    Tables<T> tables = make_tables<T>(call);
    share(parallel, call.threads, call.units() * call.blocks(),
          [&](int64_t item) { ForwardBlock<T>(call, tables, item).run(); });
}

template <class T> void backward(const Call& call, Parallel parallel) {
    Tables<T> tables = make_tables<T>(call);
    share(parallel, call.threads, call.units() * call.parts,
          [&](int64_t item) { BackwardUnit<T>(call, tables, item).run(); });
}

template <void (*row)(const Rows&, int64_t, int64_t, int64_t)> void every_row(const Rows& rows, Parallel parallel) {
    share(parallel, rows.threads, rows.batch * rows.chunks(), [&](int64_t item) {
        each_row(rows, item, [&](int64_t b, int64_t h, int64_t t) { row(rows, b, h, t); });
    });
}

// Rows that also add to `width` numbers: summed task by task, so that the result does not depend on who took what.
template <class S, void (*row)(const Rows&, int64_t, int64_t, int64_t, S*)>
void summed_rows(const Rows& rows, int64_t width, Parallel parallel) {
    const int64_t items = rows.batch * rows.chunks();
    std::vector<S> parts(items * width, S(0));
    share(parallel, rows.threads, items, [&](int64_t item) {
        each_row(rows, item, [&](int64_t b, int64_t h, int64_t t) { row(rows, b, h, t, &parts[item * width]); });
    });
    for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (int64_t item = 0; item < items; ++item) sum += double(parts[item * width + i]);
        static_cast<S*>(rows.total)[i] = S(sum);
    }
}

// In the order of PASSES in passes.py.
void (*const PASSES[])(const Rows&, Parallel) = {
    every_row<rotate_row<REAL>>,
    every_row<sphere_row<REAL>>,
    every_row<norm_row<REAL>>,
    every_row<gate_row<REAL>>,
    every_row<gate_back_row<REAL>>,
    every_row<gelu_row<REAL>>,
    every_row<gelu_back_row<REAL>>,
    every_row<tangent_row<REAL>>,
    every_row<tangent_back_row<REAL>>,
    every_row<across_row<REAL>>,
    every_row<across_back_row<REAL>>,
    [](const Rows& rows, Parallel p) { summed_rows<double, sphere_back_row<REAL>>(rows, 1, p); },
    [](const Rows& rows, Parallel p) { summed_rows<double, turned_sphere_back_row<REAL>>(rows, 1, p); },
    [](const Rows& rows, Parallel p) { summed_rows<REAL, norm_back_row<REAL>>(rows, rows.channels, p); },
};

extern "C" {
int64_t polarlm_call_size() { return sizeof(Call); }
int64_t polarlm_rows_size() { return sizeof(Operands); }
int64_t polarlm_decode_size() { return sizeof(Decode); }
int64_t polarlm_layer_size() { return sizeof(Layer); }
int64_t polarlm_vector_bytes() { return VECTOR_BYTES; }
void polarlm_forward(const Call* call, Parallel parallel) { forward<REAL>(*call, parallel); }
void polarlm_backward(const Call* call, Parallel parallel) { backward<REAL>(*call, parallel); }
void* polarlm_new_tables(const Call* call) { return new Tables<REAL>(make_tables<REAL>(*call)); }
void polarlm_drop_tables(void* tables) { delete static_cast<Tables<REAL>*>(tables); }
void polarlm_layer(const Layer* l, Parallel parallel) {
    layer<REAL>(*l, [&](int64_t items, int64_t work, auto one) {
        share(parallel, work >= (1 << 18) ? l->threads : 1, items, one);
    });
}
void polarlm_rows(int64_t pass, const Operands* operands, double radius, double eps, Parallel parallel) {
    PASSES[pass](Rows{*operands, radius, eps}, parallel);
}
}
