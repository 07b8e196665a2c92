// Element-wise K0 and K1, and backward passes, for the autograd functions of the torch code.
#pragma once

#include "pairs.h"

// Broadcast arguments of element-wise functions: (batch, rows, columns) with strides.
template <class T> struct Argument {
    const T* data;
    int64_t batch, row, column;
    void copy(int64_t b, int64_t i, int64_t j, int n, T* to) const {
        const T* from = data + b * batch + i * row + j * column;
        for (int k = 0; k < n; k++) to[k] = from[k * column];
    }
};

template <class T> using Chunked = std::function<void(int64_t, int64_t, int64_t, int64_t, int, Workspace<T>&)>;

// Calls task(batch, row, column, index, count, workspace) for chunks of an element-wise function.
template <class T> void chunks(int64_t batch, int64_t rows, int64_t columns, int threads, const Chunked<T>& task) {
    const int64_t each = (columns + CHUNK - 1) / CHUNK;
    const int64_t few = std::max<int64_t>(1, CHUNK / std::max<int64_t>(columns, 1));  // rows of a task
    const int64_t tasks = (rows + few - 1) / few;
    run<Workspace<T>>(batch * tasks, threads, [&](int64_t number, Workspace<T>& w) {
        const int64_t b = number / tasks, start = number % tasks * few;
        for (int64_t i = start; i < std::min(rows, start + few); i++)
            for (int64_t k = 0; k < each; k++)
                task(b, i, k * CHUNK, (b * rows + i) * columns + k * CHUNK,
                     int(std::min<int64_t>(CHUNK, columns - k * CHUNK)), w);
    });
}

template <class T>
void plackett_all(const int64_t* shape, const Argument<T>* x, T* first, T* second, double degenerate, int threads) {
    chunks<T>(shape[0], shape[1], shape[2], threads,
              [&](int64_t b, int64_t i, int64_t j, int64_t at, int n, Workspace<T>& w) {
                  x[0].copy(b, i, j, n, w.a);
                  x[1].copy(b, i, j, n, w.b);
                  x[2].copy(b, i, j, n, w.rho);
                  plackett(w, n, T(degenerate));
                  std::memcpy(first + at, w.first, n * sizeof(T));
                  std::memcpy(second + at, w.second, n * sizeof(T));
              });
}

// x: a, b, rho, K0 and the gradients of K0 and K1; to: those of a, b and rho.
template <class T>
void plackett_backward(const int64_t* shape, const Argument<T>* x, T* const* to, double degenerate, int threads) {
    constexpr int W = WIDTH<T>;
    chunks<T>(shape[0], shape[1], shape[2], threads,
              [&](int64_t b, int64_t i, int64_t j, int64_t at, int n, Workspace<T>& w) {
                  T* in[6] = {w.a, w.b, w.rho, w.first, w.flipped, w.size};
                  for (int k = 0; k < 6; k++) {
                      x[k].copy(b, i, j, n, in[k]);
                      for (int pad = n; pad % W; pad++) in[k][pad] = T(0.5);
                  }
                  for (int k = 0; k < n; k += W) {
                      Vec<T> a = load(w.a + k), c = load(w.b + k), rho = load(w.rho + k);
                      Vec<T> first = load(w.first + k), g0 = load(w.flipped + k), g1 = load(w.size + k);
                      Degenerate<T> d = Degenerate<T>::of(rho, T(degenerate));
                      Vec<T> by_a = shift<T>(a, c, d), by_b = shift<T>(c, a, d);
                      store(w.central.a + k, g0 * by_a + g1 * (c * first + by_b + rho * by_a));
                      store(w.central.b + k, g0 * by_b + g1 * (a * first + by_a + rho * by_b));
                      store(w.central.last + k, g0 * bivariate_density<T>(a, c, d) + g1 * first);
                  }
                  T* out[3] = {w.central.a, w.central.b, w.central.last};
                  for (int k = 0; k < 3; k++) std::memcpy(to[k] + at, out[k], n * sizeof(T));
              });
}

// Gradients of sum_k rho^k a_k b_k by rho, a and b; rows for a, then columns for b.
template <class T> struct SeriesBackward {
    int64_t batch, rows, columns, order;
    const T *rho, *left, *right, *gradient;
    T *by_rho, *by_left, *by_right;
};

template <class T> void series_backward(const SeriesBackward<T>& p, int threads) {
    constexpr int W = WIDTH<T>;
    struct Space {
        std::vector<T> sums;
        T rho[TILE], gradient[TILE], slope[TILE];
    };
    const int64_t across = (p.columns + TILE - 1) / TILE;
    auto tile = [&](int64_t b, int64_t i, int64_t column, int count, Space& w) {
        const int64_t at = (b * p.rows + i) * p.columns + column;
        for (int j = 0; j < TILE; j++) {
            w.rho[j] = j < count ? p.rho[at + j] : T(0);
            w.gradient[j] = j < count ? p.gradient[at + j] : T(0);
        }
        return at;
    };
    const int64_t lefts = p.batch * p.rows, rights = p.batch * p.columns;
    run<Space>(lefts, threads, [&](int64_t row, Space& w) {
        const int64_t b = row / p.rows, i = row % p.rows;
        w.sums.assign(size_t(p.order) * W, T(0));
        for (int64_t block = 0; block < across; block++) {
            const int64_t column = block * TILE;
            const int count = int(std::min<int64_t>(TILE, p.columns - column));
            const int64_t at = tile(b, i, column, count, w);
            FlushDenormals guard;
            for (int j = 0; j < count; j += W) {
                Vec<T> rho = load(w.rho + j), gradient = load(w.gradient + j), power = gradient, slope{};
                for (int64_t k = p.order - 1; k >= 0; k--) {
                    T buffer[W] = {};
                    const T* from = p.right + k * rights + b * p.columns + column + j;
                    std::memcpy(buffer, from, std::min(W, count - j) * sizeof(T));
                    if (k) slope = slope * rho + p.left[k * lefts + row] * T(k) * load(buffer);
                }
                for (int64_t k = 0; k < p.order; k++) {
                    T buffer[W] = {};
                    const T* from = p.right + k * rights + b * p.columns + column + j;
                    std::memcpy(buffer, from, std::min(W, count - j) * sizeof(T));
                    T* sum = w.sums.data() + k * W;
                    store(sum, load(sum) + power * load(buffer));
                    power *= rho;
                }
                store(w.slope + j, slope * gradient);
            }
            std::memcpy(p.by_rho + at, w.slope, count * sizeof(T));
        }
        for (int64_t k = 0; k < p.order; k++) {
            T sum = 0;
            for (int j = 0; j < W; j++) sum += w.sums[k * W + j];
            p.by_left[k * lefts + row] = sum;
        }
    });
    run<Space>(p.batch * across, threads, [&](int64_t number, Space& w) {
        const int64_t b = number / across, column = number % across * TILE;
        const int count = int(std::min<int64_t>(TILE, p.columns - column));
        w.sums.assign(size_t(p.order) * TILE, T(0));
        for (int64_t i = 0; i < p.rows; i++) {
            tile(b, i, column, count, w);
            FlushDenormals guard;
            for (int j = 0; j < count; j += W) {
                Vec<T> rho = load(w.rho + j), power = load(w.gradient + j);
                for (int64_t k = 0; k < p.order; k++) {
                    T* sum = w.sums.data() + k * TILE + j;
                    store(sum, load(sum) + power * p.left[k * lefts + b * p.rows + i]);
                    power *= rho;
                }
            }
        }
        for (int64_t k = 0; k < p.order; k++)
            std::memcpy(p.by_right + k * rights + b * p.columns + column, w.sums.data() + k * TILE,
                        count * sizeof(T));
    });
}
