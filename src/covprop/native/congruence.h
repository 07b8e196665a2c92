// A S A^T of small matrices. Blocks of the products stay in registers; of the second product one
// triangle is computed, and the other copied.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "lanes.h"
#include "pairs.h"
#include "threads.h"

namespace {

// Bytes of a register, and rows of a block, which is two registers wide: sums fill most registers.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, HIGH = 12;
#elif defined(__AVX2__)
constexpr int REGISTER = 32, HIGH = 6;
#else
constexpr int REGISTER = 16, HIGH = 6;
#endif

template <class T> struct Register {
    typedef T V __attribute__((vector_size(REGISTER), aligned(sizeof(T)), may_alias));
};
template <class T> constexpr int64_t NARROW = REGISTER / sizeof(T);
template <class T> constexpr int64_t WIDE = 2 * NARROW<T>;

// Rows of whole registers; not of a kilobyte, or many would meet at few places of the cache.
template <class T> int64_t padded(int64_t count) {
    const int64_t whole = (count + NARROW<T> - 1) / NARROW<T> * NARROW<T>;
    return whole * sizeof(T) % 1024 ? whole : whole + NARROW<T>;
}

// R rows and N registers of columns of C = A^T B; rows of A have a stride, those of B and C another.
template <class T, int R, int N>
INLINE void block(const T* a, int64_t a_stride, const T* b, T* c, int64_t stride, int64_t depth) {
    using V = typename Register<T>::V;
    V sum[R][N] = {};
    for (int64_t k = 0; k < depth; k++) {
        const T *row = b + k * stride, *factors = a + k * a_stride;
        V x[N];
        for (int j = 0; j < N; j++) x[j] = *(const V*)(row + j * NARROW<T>);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
            const V factor = factors[i] - V{};
            for (int j = 0; j < N; j++) sum[i][j] += factor * x[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) *(V*)(c + i * stride + j * NARROW<T>) = sum[i][j];
}

// So many rows, at most R, from a column on that a block begins with.
template <class T, int R = HIGH>
void strip(const T* a, int64_t a_stride, const T* b, T* c, int64_t stride, int64_t count, int64_t j,
           int64_t depth) {
    if (count < R) {
        if constexpr (R > 1) strip<T, R - 1>(a, a_stride, b, c, stride, count, j, depth);
        return;
    }
    for (; j + WIDE<T> <= stride; j += WIDE<T>) block<T, R, 2>(a, a_stride, b + j, c + j, stride, depth);
    if (j < stride) block<T, R, 1>(a, a_stride, b + j, c + j, stride, depth);
}

// C = A^T B, of as many columns as a stride has; upper: what is above the diagonal.
template <class T>
void product(const T* a, int64_t a_stride, const T* b, T* c, int64_t stride, int64_t rows,
             int64_t depth, bool upper) {
    for (int64_t i = 0; i < rows;) {  // strips of nearly one size
        const int64_t strips = (rows - i + HIGH - 1) / HIGH, count = (rows - i + strips - 1) / strips;
        strip(a + i, a_stride, b, c + i * stride, stride, count, upper ? i / WIDE<T> * WIDE<T> : 0, depth);
        i += count;
    }
}

// One step of transposing: the blocks of H lanes above and below the diagonal change places.
template <class T, int H, size_t... I>
INLINE void exchange(Vec<T>& x, Vec<T>& y, std::index_sequence<I...>) {
    const Vec<T> first{(I & H ? y[I & ~size_t(H)] : x[I])...}, second{(I & H ? y[I] : x[I | H])...};
    x = first;
    y = second;
}

template <class T, int H = WIDTH<T> / 2> INLINE void transpose(Vec<T>* rows) {
    for (int i = 0; i < WIDTH<T>; i++)
        if (!(i & H)) exchange<T, H>(rows[i], rows[i + H], std::make_index_sequence<WIDTH<T>>());
    if constexpr (H > 1) transpose<T, H / 2>(rows);
}

// Up to WIDTH rows and columns of a matrix, turned.
template <class T>
INLINE void turn(const T* from, int64_t stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
    if (rows < WIDTH<T> || columns < WIDTH<T>) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) to[j * to_stride + i] = from[i * stride + j];
        return;
    }
    Vec<T> block[WIDTH<T>];
    for (int i = 0; i < WIDTH<T>; i++) block[i] = load(from + i * stride);
    transpose<T>(block);
    for (int i = 0; i < WIDTH<T>; i++) store(to + i * to_stride, block[i]);
}

template <class T> struct CongruenceSpace {
    std::vector<T> numbers;
};

// turned: A^T (n x padded m); one S (n x n), which is symmetric, to one result (m x m).
template <class T>
void congruence(const T* turned, const T* s, T* result, int64_t m, int64_t n, CongruenceSpace<T>& w) {
    const int64_t stride = padded<T>(m);
    w.numbers.resize((n + m) * stride);
    T *half = w.numbers.data(), *found = half + n * stride;
    product(s, n, turned, half, stride, n, n, false);
    product(turned, stride, half, found, stride, m, n, true);
    constexpr int64_t W = WIDTH<T>;
    for (int64_t i = 0; i < m; i++)
        std::memcpy(result + i * m + i, found + i * stride + i, (m - i) * sizeof(T));
    for (int64_t i = 0; i < m; i += W) {
        const int64_t rows = std::min(W, m - i);
        for (int64_t j = i + 1; j < i + rows; j++)
            for (int64_t k = i; k < j; k++) result[j * m + k] = found[k * stride + j];
        for (int64_t j = i + rows; j < m; j += W)
            turn(found + i * stride + j, stride, result + j * m + i, m, rows, std::min(W, m - j));
    }
}

// The smallest variance of matrices (m x m), NaN if one is.
template <class T> double least_variance(const T* matrices, int64_t batch, int64_t m) {
    double least = matrices[0];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < m; i++) {
            const T variance = matrices[b * m * m + i * (m + 1)];
            if (!(variance >= least)) least = variance;
            if (variance != variance) return least;
        }
    return least;
}

// A S A^T of a batch; the smallest of the variances, NaN if one is.
template <class T>
double congruences(int64_t batch, int64_t m, int64_t n, const T* a, const T* s, T* result,
                   int threads) {
    const int64_t stride = padded<T>(m);
    large_pages(result, size_t(batch * m * m) * sizeof(T));
    static thread_local std::vector<T> turned;
    turned.assign(n * stride, T(0));
    constexpr int64_t W = WIDTH<T>;
    for (int64_t i = 0; i < m; i += W)
        for (int64_t k = 0; k < n; k += W)
            turn(a + i * n + k, n, turned.data() + k * stride + i, stride, std::min(W, m - i), std::min(W, n - k));
    const T* across = turned.data();
    run<CongruenceSpace<T>>(batch, threads, [&](int64_t b, CongruenceSpace<T>& w) {
        congruence(across, s + b * n * n, result + b * m * m, m, n, w);
    });
    return least_variance(result, batch, m);
}

}  // namespace
