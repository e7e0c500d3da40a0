// C += A·B for blocks that lie in cache, with A read by any strides, B and C by rows. No packing: the layouts of
// attention (pairs stored key by key) already give the inner loop one broadcast and one contiguous row.
#pragma once
#include "lanes.h"

// Rows × vectors of C held in registers.
constexpr int TILE_ROWS = 6, TILE_VECTORS = VECTOR_BYTES == 16 ? 4 : 2;

template <class T> struct Matrix {
    const T* at;
    int64_t row, column;  // strides
};

template <class T, int ROWS, int VECTORS, bool ADD>
inline void tile(Matrix<T> a, const T* b, int64_t b_row, T* c, int64_t c_row, int64_t begin, int64_t end) {
    Vec<T> sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = ADD ? load(c + r * c_row + v * WIDTH<T>) : Vec<T>{};
    const T* column = a.at + begin * a.column;
    for (int64_t k = begin; k < end; ++k, column += a.column) {
        Vec<T> row[VECTORS];
        for (int v = 0; v < VECTORS; ++v) row[v] = load(b + k * b_row + v * WIDTH<T>);
        for (int r = 0; r < ROWS; ++r) {
            T x = column[r * a.row];
            for (int v = 0; v < VECTORS; ++v) sum[r][v] += x * row[v];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store<T>(c + r * c_row + v * WIDTH<T>, sum[r][v]);
}

template <class T, int VECTORS, bool ADD, int ROWS = TILE_ROWS>
inline void tile_of(int rows, Matrix<T> a, const T* b, int64_t b_row, T* c, int64_t c_row, int64_t begin, int64_t end) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tile_of<T, VECTORS, ADD, ROWS - 1>(rows, a, b, b_row, c, c_row, begin, end);
    tile<T, ROWS, VECTORS, ADD>(a, b, b_row, c, c_row, begin, end);
}

// C (rows × columns, whole vectors) = or += A·B. `rows_of(first, last column)` says how many rows of a column panel
// are wanted, `range(first, last row)` which part of the inner dimension is not known to be zero.
template <class T, bool ADD, class Rows, class Range>
inline void product(int64_t rows, int64_t columns, Matrix<T> a, const T* b, int64_t b_row, T* c, int64_t c_row,
                    Rows rows_of, Range range) {
    constexpr int64_t wide = TILE_VECTORS * WIDTH<T>;
    for (int64_t n = 0; n < columns;) {
        int64_t width = columns - n >= wide ? wide : WIDTH<T>;
        int64_t wanted = rows_of(n + width, rows);
        for (int64_t m = 0; m < wanted; m += TILE_ROWS) {
            int some = wanted - m < TILE_ROWS ? int(wanted - m) : TILE_ROWS;
            auto [begin, end] = range(m, m + some);
            Matrix<T> part{a.at + m * a.row, a.row, a.column};
            if (width == wide)
                tile_of<T, TILE_VECTORS, ADD>(some, part, b + n, b_row, c + m * c_row + n, c_row, begin, end);
            else
                tile_of<T, 1, ADD>(some, part, b + n, b_row, c + m * c_row + n, c_row, begin, end);
        }
        n += width;
    }
}
