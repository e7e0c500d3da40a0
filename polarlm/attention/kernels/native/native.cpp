// Robust attention for CPUs: both passes as one parallel loop each, called from Python with raw pointers (native.py).
// Compiled once for REAL=float and, where somebody asks for it, once for REAL=double.
#include "backward.h"
#include "decode.h"

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

template <class Row> void every_row(const Rows& rows, Parallel parallel, Row row) {
    share(parallel, rows.threads, rows.batch * rows.chunks(), [&](int64_t item) { each_row(rows, item, row); });
}

extern "C" {
int64_t polarlm_call_size() { return sizeof(Call); }
int64_t polarlm_rows_size() { return sizeof(Rows); }
int64_t polarlm_decode_size() { return sizeof(Decode); }
int64_t polarlm_vector_bytes() { return VECTOR_BYTES; }
void polarlm_forward(const Call* call, Parallel parallel) { forward<REAL>(*call, parallel); }
void polarlm_backward(const Call* call, Parallel parallel) { backward<REAL>(*call, parallel); }
void* polarlm_new_tables(const Call* call) { return new Tables<REAL>(make_tables<REAL>(*call)); }
void polarlm_drop_tables(void* tables) { delete static_cast<Tables<REAL>*>(tables); }
void polarlm_decode(const Decode* d, Parallel parallel) {
    share(parallel, d->call.threads, d->rows, [&](int64_t row) {
        DecodeRow<REAL>(*d, row).run((REAL*)d->out + row * d->call.heads * d->call.size);
    });
}
void polarlm_rotate(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { rotate_row<REAL>(*rows, b, h, t); });
}
void polarlm_sphere(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { sphere_row<REAL>(*rows, b, h, t); });
}
void polarlm_norm(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { norm_row<REAL>(*rows, b, h, t); });
}
void polarlm_norm_backward(const Rows* rows, Parallel parallel) {
    share(parallel, rows->threads, rows->batch * rows->chunks(), [&](int64_t item) {
        REAL* d_gain = static_cast<REAL*>(rows->d_gain) + item * rows->channels;
        each_row(*rows, item, [&](int64_t b, int64_t h, int64_t t) { norm_back_row<REAL>(*rows, b, h, t, d_gain); });
    });
}
void polarlm_gate(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { gate_row<REAL>(*rows, b, h, t); });
}
void polarlm_gate_backward(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { gate_back_row<REAL>(*rows, b, h, t); });
}
void polarlm_gelu(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { gelu_row<REAL>(*rows, b, h, t); });
}
void polarlm_gelu_backward(const Rows* rows, Parallel parallel) {
    every_row(*rows, parallel, [&](int64_t b, int64_t h, int64_t t) { gelu_back_row<REAL>(*rows, b, h, t); });
}
void polarlm_sphere_backward(const Rows* rows, Parallel parallel) {
    share(parallel, rows->threads, rows->batch * rows->chunks(), [&](int64_t item) {
        double sum = 0;
        each_row(*rows, item, [&](int64_t b, int64_t h, int64_t t) { sum += sphere_back_row<REAL>(*rows, b, h, t); });
        rows->d_radius[item] = sum;
    });
}
}
