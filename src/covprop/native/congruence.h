// A S A^T of small matrices. Blocks of the products stay in registers; of the second product one
// triangle is computed, and the other copied.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "threads.h"

namespace {

// Bytes of a register, and rows of a block, which is two registers wide: sums fill most registers.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, HIGH = 8;
#elif defined(__AVX2__)
constexpr int REGISTER = 32, HIGH = 6;
#else
constexpr int REGISTER = 16, HIGH = 4;
#endif

template <class T> struct Register {
    typedef T V __attribute__((vector_size(REGISTER), aligned(sizeof(T)), may_alias));
};
template <class T> constexpr int64_t WIDE = 2 * REGISTER / sizeof(T);

template <class T> int64_t padded(int64_t count) { return (count + WIDE<T> - 1) / WIDE<T> * WIDE<T>; }

// R rows and WIDE columns of C = A B; rows of A have a stride, those of B and C another.
template <class T, int R>
INLINE void block(const T* a, int64_t a_stride, const T* b, T* c, int64_t stride, int64_t depth) {
    using V = typename Register<T>::V;
    V sum[R][2] = {};
    for (int64_t k = 0; k < depth; k++) {
        const T* row = b + k * stride;
        const V x = *(const V*)row, y = *(const V*)(row + WIDE<T> / 2);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const V factor = a[i * a_stride + k] - V{};
            sum[i][0] += factor * x;
            sum[i][1] += factor * y;
        }
    }
    for (int i = 0; i < R; i++) {
        *(V*)(c + i * stride) = sum[i][0];
        *(V*)(c + i * stride + WIDE<T> / 2) = sum[i][1];
    }
}

// C = A B, of as many rows as A and columns as a stride has; upper: what is above the diagonal.
template <class T>
void product(const T* a, int64_t a_stride, const T* b, T* c, int64_t stride, int64_t rows,
             int64_t depth, bool upper) {
    for (int64_t i = 0; i < rows;) {
        const bool high = i + HIGH <= rows;
        for (int64_t j = upper ? i / WIDE<T> * WIDE<T> : 0; j < stride; j += WIDE<T>) {
            const T* left = a + i * a_stride;
            T* to = c + i * stride + j;
            if (high) block<T, HIGH>(left, a_stride, b + j, to, stride, depth);
            else block<T, 1>(left, a_stride, b + j, to, stride, depth);
        }
        i += high ? HIGH : 1;
    }
}

// The rows of a matrix, each with zeros behind it.
template <class T> void pad(const T* from, T* to, int64_t rows, int64_t columns, int64_t stride) {
    for (int64_t i = 0; i < rows; i++) {
        std::memcpy(to + i * stride, from + i * columns, columns * sizeof(T));
        std::fill(to + i * stride + columns, to + (i + 1) * stride, T(0));
    }
}

template <class T> struct CongruenceSpace {
    std::vector<T> numbers;
};

// turned: A^T (n x padded m); one S (n x n) to one result (m x m).
template <class T>
void congruence(const T* a, const T* turned, const T* s, T* result, int64_t m, int64_t n,
                CongruenceSpace<T>& w) {
    const int64_t long_n = padded<T>(n), long_m = padded<T>(m);
    w.numbers.resize((n + m) * long_n + m * long_m);
    T *rows = w.numbers.data(), *half = rows + n * long_n, *found = half + m * long_n;
    pad(s, rows, n, n, long_n);
    product(a, n, rows, half, long_n, m, n, false);
    product(half, long_n, turned, found, long_m, m, n, true);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = i; j < m; j++)
            result[i * m + j] = result[j * m + i] = found[i * long_m + j];
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
    static thread_local std::vector<T> turned;
    turned.assign(n * stride, T(0));
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < n; k++) turned[k * stride + i] = a[i * n + k];
    const T* across = turned.data();
    run<CongruenceSpace<T>>(batch, threads, [&](int64_t b, CongruenceSpace<T>& w) {
        congruence(a, across, s + b * n * n, result + b * m * m, m, n, w);
    });
    return least_variance(result, batch, m);
}

}  // namespace
