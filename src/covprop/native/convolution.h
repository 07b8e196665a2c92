// A S A^T of a convolution A, for matrices of any size.
//
// Vectors are images (channels, height, width). Some of them at a time lie side by side, so that a
// place of all of them is two registers: a panel, (places, channels, images), of which the places
// under a row of the kernel are one piece of memory. Sums of several outputs stay in registers.
#pragma once

#include <algorithm>
#include <vector>

#include "congruence.h"
#include "pairs.h"
#include "threads.h"

// A call: what compiled.py has in a structure of the same layout. weight: (outputs, channels, tall,
// wide); rows, columns: places of the result; above, left: zeros around the images.
struct Convolution {
    int64_t channels, height, width, outputs, tall, wide, down, right, above, left, rows, columns;
    int64_t inputs() const { return channels * height * width; }
    int64_t places() const { return rows * columns; }
    int64_t features() const { return outputs * places(); }
};

namespace {

// Images of a panel, and outputs whose sums stay in registers.
template <class T> constexpr int64_t SIDE = 2 * WIDTH<T>;
constexpr int TOGETHER = VECTOR_BYTES == 64 ? 12 : 6;

// Asks for memory that is read or written soon, where the processor cannot see it coming.
constexpr int TILES = 4, ROWS = 32;  // how far ahead
template <class T, bool WRITTEN> INLINE void fetch(const T* from, int64_t count) {
    for (int64_t k = 0; k < count; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k, WRITTEN);
}

template <class T> struct ConvolutionSpace {
    std::vector<T> panel, found;
};

// Sums of R outputs at one place of all images, to (R, places, images).
template <class T, int R>
INLINE void sums(const Convolution& f, const T* weight, const T* panel, int64_t row, int64_t column, T* to) {
    const int64_t top = row * f.down - f.above, first = column * f.right - f.left;
    const int64_t from = std::max<int64_t>(0, -top), until = std::min(f.tall, f.height - top);
    const int64_t begin = std::max<int64_t>(0, -first), end = std::min(f.wide, f.width - first);
    Vec<T> sum[R][2] = {};
    for (int64_t i = from; i < until && begin < end; i++) {
        const T* x = panel + ((top + i) * f.width + first + begin) * f.channels * SIDE<T>;
        const T* w = weight + (i * f.wide + begin) * f.channels * f.outputs;
        for (int64_t k = (end - begin) * f.channels; k > 0; k--, x += SIDE<T>, w += f.outputs) {
            const Vec<T> left = load(x), right = load(x + WIDTH<T>);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Vec<T> factor = all<T>(w[r]);
                sum[r][0] += factor * left;
                sum[r][1] += factor * right;
            }
        }
    }
    const int64_t stride = f.places() * SIDE<T>;
    for (int r = 0; r < R; r++) {
        store(to + r * stride, sum[r][0]);
        store(to + r * stride + WIDTH<T>, sum[r][1]);
    }
}

// The same of outputs [first, last) at places [start, stop), to (outputs, places, images).
template <class T, int R = TOGETHER>
void outputs(const Convolution& f, const T* weight, const T* panel, int64_t first, int64_t last,
             int64_t start, int64_t stop, T* to) {
    if (last - first < R) {
        if constexpr (R > 1) outputs<T, R - 1>(f, weight, panel, first, last, start, stop, to);
        return;
    }
    for (int64_t place = start; place < stop; place++)
        sums<T, R>(f, weight + first, panel, place / f.columns, place % f.columns,
                   to + (first * f.places() + place) * SIDE<T>);
}

// As many groups of outputs as it takes, of nearly one size.
template <class T>
void convolve(const Convolution& f, const T* weight, const T* panel, int64_t first, int64_t start,
              int64_t stop, T* to) {
    while (first < f.outputs && start < stop) {
        const int64_t left = f.outputs - first, groups = (left + TOGETHER - 1) / TOGETHER;
        const int64_t last = first + (left + groups - 1) / groups;
        outputs<T>(f, weight, panel, first, last, start, stop, to);
        first = last;
    }
}

// A S of some rows of S, from their memory to (features, images).
template <class T>
void half_panel(const Convolution& f, const T* weight, const T* rows, int64_t count, T* to,
                ConvolutionSpace<T>& w) {
    const int64_t area = f.height * f.width, n = f.inputs(), step = f.channels * SIDE<T>;
    w.panel.resize(n * SIDE<T>);
    if (count < SIDE<T>) std::fill(w.panel.begin(), w.panel.end(), T(0));
    for (int64_t c = 0; c < f.channels; c++)
        for (int64_t place = 0; place < area; place += WIDTH<T>)
            for (int64_t i = 0; i < count; i += WIDTH<T>)
                turn(rows + i * n + c * area + place, n, w.panel.data() + place * step + c * SIDE<T> + i, step,
                     std::min<int64_t>(WIDTH<T>, count - i), std::min<int64_t>(WIDTH<T>, area - place));
    convolve(f, weight, w.panel.data(), 0, 0, f.places(), to);
}

// Columns [at, at + SIDE) of A (S A^T) from the diagonal on, and the rows that they are.
template <class T>
void whole_panel(const Convolution& f, const T* weight, const T* half, int64_t at, T* result,
                 ConvolutionSpace<T>& w) {
    const int64_t area = f.height * f.width, n = f.inputs(), m = f.features(), places = f.places();
    const int64_t count = std::min(SIDE<T>, m - at);
    w.panel.resize(n * SIDE<T>);
    w.found.resize(m * SIDE<T>);
    if (count < SIDE<T>) std::fill(w.panel.begin(), w.panel.end(), T(0));
    for (int64_t j = 0; j < n; j += WIDTH<T>) {
        const T* tile = half + (j / SIDE<T> * m + at) * SIDE<T> + j % SIDE<T>;
        if (j % SIDE<T> == 0 && j + TILES * SIDE<T> < n)
            fetch<T, false>(tile + TILES * m * SIDE<T>, count * SIDE<T>);
        T block[WIDTH<T> * SIDE<T>];
        const int64_t here = std::min<int64_t>(WIDTH<T>, n - j);
        for (int64_t i = 0; i < count; i += WIDTH<T>)
            turn(tile + i * SIDE<T>, SIDE<T>, block + i, SIDE<T>, std::min<int64_t>(WIDTH<T>, count - i), here);
        for (int64_t k = 0; k < here; k++) {
            const int64_t c = (j + k) / area, place = (j + k) % area;
            std::memcpy(w.panel.data() + (place * f.channels + c) * SIDE<T>, block + k * SIDE<T>,
                        count * sizeof(T));
        }
    }
    T* found = w.found.data();
    const int64_t own = at / places, within = at % places;
    convolve(f, weight, w.panel.data(), own, within, places, found);
    convolve(f, weight, w.panel.data(), own + 1, 0, within, found);
    for (int64_t r = at; r < at + count; r++)
        for (int64_t c = at; c <= r; c++) result[r * m + c] = result[c * m + r] = found[r * SIDE<T> + c - at];
    for (int64_t r = at + count; r < m; r++) {
        if (r + ROWS < m) fetch<T, true>(result + (r + ROWS) * m + at, count);
        std::memcpy(result + r * m + at, found + r * SIDE<T>, count * sizeof(T));
    }
    for (int64_t r = at + count; r < m; r += WIDTH<T>)
        for (int64_t c = 0; c < count; c += WIDTH<T>)
            turn(found + r * SIDE<T> + c, SIDE<T>, result + (at + c) * m + r, m,
                 std::min<int64_t>(WIDTH<T>, m - r), std::min<int64_t>(WIDTH<T>, count - c));
}

// A S A^T of a batch; half: memory for (batch, inputs rounded up to whole panels, features).
// Returns the smallest of the variances, NaN if one is.
template <class T>
double convolved(const Convolution& f, int64_t batch, const T* weight, const T* s, T* half, T* result, int threads) {
    const int64_t n = f.inputs(), m = f.features(), taps = f.tall * f.wide;
    const int64_t down = (n + SIDE<T> - 1) / SIDE<T>, across = (m + SIDE<T> - 1) / SIDE<T>;
    large_pages(half, size_t(batch * down * SIDE<T> * m) * sizeof(T));
    large_pages(result, size_t(batch * m * m) * sizeof(T));
    std::vector<T> turned(size_t(taps * f.channels * f.outputs));  // (taps, channels, outputs)
    for (int64_t o = 0; o < f.outputs; o++)
        for (int64_t c = 0; c < f.channels; c++)
            for (int64_t t = 0; t < taps; t++)
                turned[size_t((t * f.channels + c) * f.outputs + o)] = weight[(o * f.channels + c) * taps + t];
    run<ConvolutionSpace<T>>(batch * down, threads, [&](int64_t task, ConvolutionSpace<T>& w) {
        const int64_t b = task / down, at = task % down * SIDE<T>;
        half_panel(f, turned.data(), s + (b * n + at) * n, std::min(SIDE<T>, n - at),
                   half + task * SIDE<T> * m, w);
    });
    run<ConvolutionSpace<T>>(batch * across, threads, [&](int64_t task, ConvolutionSpace<T>& w) {
        const int64_t b = task / across;
        whole_panel(f, turned.data(), half + b * down * SIDE<T> * m, task % across * SIDE<T>,
                    result + b * m * m, w);
    });
    return least_variance(result, batch, m);
}

}  // namespace
