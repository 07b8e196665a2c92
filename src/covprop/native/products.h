// Products of large matrices, and slices of third cumulants from their factors.
//
// Sums of a tile of the result stay in registers. The rows that all tiles of a strip need are packed,
// one strip of a few registers' width at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "congruence.h"
#include "threads.h"

namespace {

// Terms that are summed at a time, and rows of a result that are one task.
constexpr int64_t TERMS = 256, STRIP = 256;
constexpr int FACTORS = 4;

// R rows and WIDE columns of C += A B; B is packed.
template <class T, int R>
INLINE void tile(const T* a, int64_t a_row, int64_t a_term, const T* b, T* c, int64_t stride, int64_t terms) {
    using V = typename Register<T>::V;
    V sum[R][2];
    for (int i = 0; i < R; i++) {
        sum[i][0] = *(const V*)(c + i * stride);
        sum[i][1] = *(const V*)(c + i * stride + WIDE<T> / 2);
    }
    for (int64_t k = 0; k < terms; k++) {
        const V x = *(const V*)(b + k * WIDE<T>), y = *(const V*)(b + k * WIDE<T> + WIDE<T> / 2);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const V factor = a[i * a_row + k * a_term] - V{};
            sum[i][0] += factor * x;
            sum[i][1] += factor * y;
        }
    }
    for (int i = 0; i < R; i++) {
        *(V*)(c + i * stride) = sum[i][0];
        *(V*)(c + i * stride + WIDE<T> / 2) = sum[i][1];
    }
}

// A strip of WIDE columns of C += A B, C with room for whole strips.
template <class T>
void strip(const T* a, int64_t a_row, int64_t a_term, const T* b, T* c, int64_t stride, int64_t rows, int64_t terms) {
    int64_t i = 0;
    for (; i + HIGH <= rows; i += HIGH)
        tile<T, HIGH>(a + i * a_row, a_row, a_term, b, c + i * stride, stride, terms);
    for (; i < rows; i++) tile<T, 1>(a + i * a_row, a_row, a_term, b, c + i * stride, stride, terms);
}

// Columns from j on of some rows, with zeros behind the last.
template <class T> void pack(const T* from, int64_t stride, int64_t j, int64_t columns, int64_t rows, T* to) {
    const int64_t some = std::min(WIDE<T>, columns - j);
    for (int64_t k = 0; k < rows; k++, to += WIDE<T>) {
        std::memcpy(to, from + k * stride + j, some * sizeof(T));
        std::fill(to + some, to + WIDE<T>, T(0));
    }
}

// Factors e, w, q and r of (count, n), one after another, of the elements of a batch.
template <class T> struct Factors {
    const T* data;
    int64_t n, batch;
    const T* row(int64_t b, int f, int64_t count, int64_t k) const {
        return data + b * batch + (f * count + k) * n;
    }
};

template <class T> struct ProductSpace {
    std::vector<T> packed, found, left;
};

template <class T> void written(const ProductSpace<T>& w, int64_t stride, T* to, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(to + i * columns, w.found.data() + i * stride, columns * sizeof(T));
}

// C = A B of a batch: A (rows, terms) of any strides, B (terms, columns) of contiguous rows.
template <class T> struct Product {
    int64_t batch, rows, terms, columns;
    const T* a;
    int64_t a_batch, a_row, a_term;
    const T* b;
    int64_t b_batch, b_row;
    T* c;
};

template <class T> void product_of(const Product<T>& p, int threads) {
    const int64_t stride = padded<T>(p.columns), parts = (p.rows + STRIP - 1) / STRIP;
    run<ProductSpace<T>>(p.batch * parts, threads, [&](int64_t task, ProductSpace<T>& w) {
        const int64_t one = task / parts, first = task % parts * STRIP, some = std::min(STRIP, p.rows - first);
        const T *a = p.a + one * p.a_batch + first * p.a_row, *b = p.b + one * p.b_batch;
        w.packed.resize(TERMS * WIDE<T>);
        w.found.assign(some * stride, T(0));
        for (int64_t k = 0; k < p.terms; k += TERMS) {
            const int64_t terms = std::min(TERMS, p.terms - k);
            for (int64_t j = 0; j < p.columns; j += WIDE<T>) {
                pack(b + k * p.b_row, p.b_row, j, p.columns, terms, w.packed.data());
                strip(a + k * p.a_term, p.a_row, p.a_term, w.packed.data(), w.found.data() + j, stride, some, terms);
            }
        }
        written(w, stride, p.c + (one * p.rows + first) * p.columns, some, p.columns);
    });
}

// T(x_i, x_i, z_j) = sum (w q + 2 r e) e' + (e q) w' + (e w) q' + (e e) r' over columns of factors
// of x and, with ', of z.
template <class T>
void slices(int64_t batch, int64_t count, const Factors<T>& x, const Factors<T>& z, T* result, int threads) {
    constexpr int64_t PART = TERMS / FACTORS;
    const int64_t stride = padded<T>(z.n), parts = (x.n + STRIP - 1) / STRIP;
    run<ProductSpace<T>>(batch * parts, threads, [&](int64_t task, ProductSpace<T>& s) {
        const int64_t one = task / parts, first = task % parts * STRIP, some = std::min(STRIP, x.n - first);
        s.packed.resize(TERMS * WIDE<T>);
        s.left.resize(TERMS * STRIP);
        s.found.assign(some * stride, T(0));
        for (int64_t k = 0; k < count; k += PART) {
            const int64_t terms = std::min(PART, count - k);
            for (int64_t m = 0; m < terms; m++) {
                const T *e = x.row(one, 0, count, k + m) + first, *w = x.row(one, 1, count, k + m) + first;
                const T *q = x.row(one, 2, count, k + m) + first, *r = x.row(one, 3, count, k + m) + first;
                T* to = s.left.data() + m * some;
                const int64_t next = terms * some;
                for (int64_t i = 0; i < some; i++) {
                    to[i] = w[i] * q[i] + 2 * r[i] * e[i];
                    to[i + next] = e[i] * q[i];
                    to[i + 2 * next] = e[i] * w[i];
                    to[i + 3 * next] = e[i] * e[i];
                }
            }
            for (int64_t j = 0; j < z.n; j += WIDE<T>) {
                for (int f = 0; f < FACTORS; f++)
                    pack(z.row(one, f, count, k), z.n, j, z.n, terms, s.packed.data() + f * terms * WIDE<T>);
                strip(s.left.data(), 1, some, s.packed.data(), s.found.data() + j, stride, some, FACTORS * terms);
            }
        }
        written(s, stride, result + (one * x.n + first) * z.n, some, z.n);
    });
}

// sum_k rho^k a_k b_k of matrices rho (rows, columns), of which there are `different` and the others
// are the same again; a (orders, count, rows), b (orders, count, columns).
template <class T> struct PowerSeries {
    int64_t count, different, rows, columns, orders;
    const T *rho, *a, *b;
    T* result;
};

struct NoSpace {};

template <class T> void power_series(const PowerSeries<T>& p, int threads) {
    constexpr int64_t PART = 32, SPAN = 2 * WIDE<T>;
    const int64_t parts = (p.rows + PART - 1) / PART;
    run<NoSpace>(p.count * parts, threads, [&](int64_t task, NoSpace&) {
        const int64_t one = task / parts, first = task % parts * PART;
        for (int64_t i = first; i < std::min(first + PART, p.rows); i++) {
            const T* rho = p.rho + (one % p.different * p.rows + i) * p.columns;
            T* to = p.result + (one * p.rows + i) * p.columns;
            for (int64_t j = 0; j < p.columns; j += SPAN) {
                const int64_t some = std::min(SPAN, p.columns - j);
                T total[SPAN] = {};
                for (int64_t k = p.orders - 1; k >= 0; k--) {
                    const T a = p.a[(k * p.count + one) * p.rows + i];
                    const T* b = p.b + (k * p.count + one) * p.columns + j;
                    if (some == SPAN)
                        for (int64_t m = 0; m < SPAN; m++) total[m] = total[m] * rho[j + m] + a * b[m];
                    else
                        for (int64_t m = 0; m < some; m++) total[m] = total[m] * rho[j + m] + a * b[m];
                }
                std::memcpy(to + j, total, some * sizeof(T));
            }
        }
    });
}

}  // namespace
