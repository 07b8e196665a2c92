// Covariances of all pairs of two activated vectors, tile by tile.
//
// A tile has as many terms of the series as its bound asks for, or a direct formula for the pairs
// that a shorter series does not reach; both triangles of a symmetric result are written once.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "plackett.h"
#include "threads.h"

constexpr int TILE = 64;
static_assert(TILE * TILE == CHUNK, "a tile is a chunk");
constexpr int MOST_STEPS = 16;  // orders of a ladder, at most

// What the kernel needs of the elements of one side; rows of numbers have a stride of all elements.
template <class T> struct Side {
    const T* inverse;       // 1 / sigma
    const T* tails;         // what is left of the series after each order of the ladder, or null
    const T* coefficients;  // a_k / sigma, in their units
    const T* units;
    const T* numbers;  // those of the direct formula
    int64_t knots;     // of a piecewise-linear function
    int64_t size;      // elements of one batch
    int64_t all;       // of all
};

enum Direct { NONE, KNOTS, PROBIT, GELU };

// A call: what compiled.py has in a structure of the same layout.
template <class T> struct Pairs {
    Side<T> left, right;
    int64_t batch;
    const T* covariance;
    int64_t covariance_batch, covariance_row;  // strides
    T* result;          // contiguous
    const T* diagonal;  // of the result, which is symmetric, or null
    int64_t order;      // coefficients of an element
    const int64_t* ladder;  // orders that the series may have,
    int64_t steps;          // and how many they are: none to take all coefficients
    int64_t direct;         // formula for pairs that the series does not reach
    double accuracy, direct_cost, height, degenerate;
};

template <class T> struct TileSpace {
    Workspace<T> pairs;
    T rho[CHUNK], c[CHUNK], found[CHUNK];
    T inverse[TILE], units[TILE];
    std::vector<T> coefficients, row;
    int place[CHUNK];
    T gathered[8][CHUNK];
};

template <class T> struct Tile {
    int64_t batch, row, column;
    int rows, columns;
};

// sum_k rho^(k-1) a_k b_k, times c and the units, for the whole tile.
template <class T> void series(const Pairs<T>& p, const Tile<T>& tile, TileSpace<T>& w, int order) {
    constexpr int W = WIDTH<T>;
    w.coefficients.resize(size_t(order) * TILE);
    const int64_t first_row = tile.batch * p.left.size + tile.row;
    const int64_t first_column = tile.batch * p.right.size + tile.column;
    for (int k = 0; k < order; k++) {
        const T* from = p.right.coefficients + k * p.right.all + first_column;
        T* to = w.coefficients.data() + k * TILE;
        for (int j = 0; j < TILE; j++) to[j] = j < tile.columns ? from[j] : T(0);
    }
    for (int j = 0; j < TILE; j++)
        w.units[j] = p.right.units && j < tile.columns ? p.right.units[first_column + j] : T(1);
    const T* b = w.coefficients.data();
    w.row.resize(size_t(order));
    T* a = w.row.data();
    for (int i = 0; i < tile.rows; i++) {
        for (int k = 0; k < order; k++) a[k] = p.left.coefficients[k * p.left.all + first_row + i];
        T unit = p.left.units ? p.left.units[first_row + i] : T(1);
        T *rho = w.rho + i * TILE, *c = w.c + i * TILE, *found = w.found + i * TILE;
        const int start = p.diagonal && tile.row == tile.column ? i / (2 * W) * (2 * W) : 0;
        {
            FlushDenormals guard;
            for (int j = start; j < tile.columns; j += 2 * W) {
                Vec<T> x = load(rho + j), y = load(rho + j + W);
                const T* last = b + (order - 1) * TILE + j;
                Vec<T> u = a[order - 1] * load(last), v = a[order - 1] * load(last + W);
                for (int k = order - 2; k >= 0; k--) {
                    u = u * x + a[k] * load(b + k * TILE + j);
                    v = v * y + a[k] * load(b + k * TILE + j + W);
                }
                store(found + j, u);
                store(found + j + W, v);
            }
        }
        for (int j = start; j < tile.columns; j += W)
            store(found + j, load(found + j) * (load(c + j) * unit * load(w.units + j)));
    }
}

// GELU: Price's integral for small R = c / (S_i S_j), where the closed form cancels, or that form.
template <class T> void gelu(const Pairs<T>& p, Workspace<T>& w, const T* c, const T* left[3],
                             const T* right[3], T* found, int n) {
    constexpr int W = WIDTH<T>, nodes = Accuracy<T>::gelu_nodes;
    const Rule<nodes>& gauss = rule<nodes>();
    bool large = false;
    for (int i = 0; i < n; i++) {
        w.a[i] = left[0][i];
        w.b[i] = right[0][i];
        w.rho[i] = c[i] / (left[1][i] * right[1][i]);
        large |= !(std::fabs(w.rho[i]) <= T(0.5));
    }
    if (large) plackett(w, n, T(p.degenerate));
    for (int at = 0; at < n; at += W) {
        Vec<T> a = load(w.a + at), b = load(w.b + at), limit = load(w.rho + at), cov = load(c + at);
        Vec<T> s1 = load(left[1] + at), s2 = load(right[1] + at);
        Vec<T> slopes = load(left[2] + at) * load(right[2] + at);
        Mask<T> small = absolute<T>(limit) <= T(0.5);
        Vec<T> angle = arcsine(small ? limit : Vec<T>{}), total{};
        {
            FlushDenormals guard;
            Vec<T> halves = (a * a + b * b) * T(0.5), product = a * b;
            for (int i = 0; i < nodes; i++) {
                Vec<T> r = sine(angle * T(gauss.node[i])), rest = T(1) - r * r;
                Vec<T> inverse = T(1) / rest;
                Vec<T> d1 = (a - r * b) / s1 * inverse, d2 = (b - r * a) / s2 * inverse;
                Vec<T> cross = r / (s1 * s2) * inverse;
                Vec<T> polynomial = (T(1) + inverse / (s1 * s1) - d1 * d1) *
                                        (T(1) + inverse / (s2 * s2) - d2 * d2) +
                                    T(4) * d1 * d2 * cross + T(2) * cross * cross;
                Vec<T> value = exponential<T>((product * r - halves) * inverse);
                total += value * T(gauss.weight[i]) * (limit - r) * polynomial;
            }
        }
        Vec<T> result = cov * slopes + s1 * s2 * total * angle * T(1 / (2 * PI));
        if (large) {
            Degenerate<T> d = Degenerate<T>::of(limit, T(p.degenerate));
            Vec<T> edge = root<T>(d.gap * (T(2) - d.gap));
            Vec<T> relu = s1 * s2 * (limit * cumulative<T>(a) * cumulative<T>(b) + load(w.second + at));
            auto given_zero = [&](Vec<T> x, Vec<T> y, Vec<T> ratio) {
                Vec<T> move = y - limit * x, size = absolute<T>(move);
                Mask<T> near = size < T(SATURATION) * edge;
                Vec<T> z = near ? size / (near ? edge : all<T>(T(1))) : all<T>(T(SATURATION));
                Vec<T> inner = nonnegative<T>(move) + edge * partial_expectation<T>(-z) -
                               partial_expectation<T>(y);
                return bell<T>(x) * T(1 / SQRT_2PI) * ratio * inner;
            };
            Vec<T> product = bell<T>(a) * bell<T>(b) * T(1 / (2 * PI));
            Vec<T> both = (bivariate_density<T>(a, b, d) - product) / (s1 * s2);
            Vec<T> closed = relu - given_zero(a, b, s2 / s1) - given_zero(b, a, s1 / s2) + both;
            result = small ? result : closed;
        }
        store(found + at, result);
    }
}

// The direct formula for n gathered pairs of a tile, at w.place.
template <class T> void direct(const Pairs<T>& p, const Tile<T>& tile, TileSpace<T>& w, int n) {
    Workspace<T>& s = w.pairs;
    const T* rows = p.left.numbers + tile.batch * p.left.size + tile.row;
    const T* columns = p.right.numbers + tile.batch * p.right.size + tile.column;
    auto gather = [&](const T* from, int64_t number, int64_t all, bool row, T* to) {
        const T* numbers = from + number * all;
        for (int i = 0; i < n; i++)
            to[i] = numbers[row ? w.place[i] / TILE : w.place[i] % TILE];
        for (int i = n; i % WIDTH<T>; i++) to[i] = T(0.5);
    };
    auto left = [&](int64_t number, T* to) { gather(rows, number, p.left.all, true, to); };
    auto right = [&](int64_t number, T* to) { gather(columns, number, p.right.all, false, to); };
    T *c = w.gathered[0], *found = w.gathered[1], *u = w.gathered[2], *v = w.gathered[3];
    for (int i = 0; i < n; i++) c[i] = w.c[w.place[i]];
    for (int i = n; i % WIDTH<T>; i++) c[i] = T(0);
    if (p.direct == KNOTS) {
        left(0, u);
        right(0, v);
        for (int i = 0; i < n; i++) found[i] = c[i] * (u[i] * v[i]);
        for (int k = 0; k < p.left.knots; k++) {
            for (int l = 0; l < p.right.knots; l++) {
                left(1 + k, s.a);
                right(1 + l, s.b);
                for (int i = 0; i < n; i++) s.rho[i] = w.rho[w.place[i]];
                plackett(s, n, T(p.degenerate));
                left(1 + p.left.knots + k, u);
                right(1 + p.right.knots + l, v);
                for (int i = 0; i < n; i++) found[i] += u[i] * v[i] * s.second[i];
            }
        }
    } else if (p.direct == PROBIT) {
        left(0, s.a);
        right(0, s.b);
        left(1, u);
        right(1, v);
        for (int i = 0; i < n; i++) s.rho[i] = c[i] * (u[i] * v[i]);
        plackett(s, n, T(p.degenerate));
        for (int i = 0; i < n; i++) found[i] = T(p.height * p.height) * s.first[i];
    } else {
        const T *first[3], *second[3];
        for (int k = 0; k < 3; k++) {
            left(k, w.gathered[2 + 2 * k]);
            right(k, w.gathered[3 + 2 * k]);
            first[k] = w.gathered[2 + 2 * k];
            second[k] = w.gathered[3 + 2 * k];
        }
        gelu(p, s, c, first, second, found, n);
    }
    for (int i = 0; i < n; i++) w.found[w.place[i]] = found[i];
}

// The largest of each row of tails in a range, as logarithms.
template <class T> void heights(const Side<T>& side, int64_t first, int count, int steps, double* to) {
    for (int k = 0; k < steps; k++) {
        T most = 0;
        for (int i = 0; i < count; i++) most = std::max(most, side.tails[k * side.all + first + i]);
        to[k] = std::log(std::max(double(most), 1e-150));
    }
}

// Computes a tile in w.found, and returns how many of its pairs are beyond the series and left.
template <class T> int64_t compute(const Pairs<T>& p, const Tile<T>& tile, TileSpace<T>& w) {
    constexpr int W = WIDTH<T>;
    const int64_t first_row = tile.batch * p.left.size + tile.row;
    const int64_t first_column = tile.batch * p.right.size + tile.column;
    for (int j = 0; j < TILE; j++)
        w.inverse[j] = j < tile.columns ? p.right.inverse[first_column + j] : T(0);
    const bool on_diagonal = p.diagonal && tile.row == tile.column;
    Vec<T> most{};
    for (int i = 0; i < tile.rows; i++) {
        const T* from = p.covariance + tile.batch * p.covariance_batch +
                        (tile.row + i) * p.covariance_row + tile.column;
        T *c = w.c + i * TILE, *rho = w.rho + i * TILE;
        std::memcpy(c, from, tile.columns * sizeof(T));
        for (int j = tile.columns; j < TILE; j++) c[j] = 0;
        if (on_diagonal) c[i] = 0;  // it is known; its rho = 1 would make it a hard tile
        T inverse = p.left.inverse[first_row + i];
        for (int j = 0; j < TILE; j += W) {
            Vec<T> r = load(c + j) * inverse * load(w.inverse + j);
            store(rho + j, r);
            most = larger<Vec<T>>(most, absolute<T>(r));
        }
    }
    const auto everything = [&] {
        int n = 0;
        for (int i = 0; i < tile.rows; i++)
            for (int j = on_diagonal ? i + 1 : 0; j < tile.columns; j++) w.place[n++] = i * TILE + j;
        direct(p, tile, w, n);
    };
    if (!p.order) {
        everything();
        return 0;
    }
    if (!p.steps) {
        series(p, tile, w, int(p.order));
        return 0;
    }
    T largest = 0;
    for (int j = 0; j < W; j++) largest = std::max(largest, most[j]);
    double left[MOST_STEPS], right[MOST_STEPS], limit[MOST_STEPS];
    heights(p.left, first_row, tile.rows, int(p.steps), left);
    heights(p.right, first_column, tile.columns, int(p.steps), right);
    const double goal = std::log(double(p.accuracy)), size = std::log(std::max(double(largest), 1e-300));
    int enough = 0;
    while (enough < p.steps &&
           size * (p.ladder[enough] + 1) + left[enough] + right[enough] > goal)
        enough++;
    if (enough < p.steps && (!enough || !p.direct)) {
        series(p, tile, w, int(p.ladder[enough]));
        return 0;
    }
    for (int k = 0; k < p.steps; k++)
        limit[k] = std::exp((goal - left[k] - right[k]) / (p.ladder[k] + 1));
    if (!p.direct) {  // the caller finishes the pairs that the longest series does not reach
        series(p, tile, w, int(p.ladder[p.steps - 1]));
        int64_t beyond = 0;
        for (int i = 0; i < tile.rows; i++)
            for (int j = 0; j < tile.columns; j++)
                beyond += !(std::fabs(double(w.rho[i * TILE + j])) <= limit[p.steps - 1]);
        return beyond;
    }
    int best = -1, count = tile.rows * tile.columns;
    double least = p.direct_cost * count;
    for (int k = 0; k < std::min<int>(enough + 1, int(p.steps)); k++) {
        int beyond = 0;
        if (k < enough)
            for (int i = 0; i < tile.rows * TILE; i++) beyond += std::fabs(w.rho[i]) > T(limit[k]);
        double cost = double(p.ladder[k]) * count + p.direct_cost * beyond;
        if (cost < least) {
            least = cost;
            best = k;
        }
    }
    if (best < 0) {
        everything();
        return 0;
    }
    series(p, tile, w, int(p.ladder[best]));
    if (best == enough) return 0;
    int n = 0;
    for (int i = 0; i < tile.rows; i++)
        for (int j = on_diagonal ? i + 1 : 0; j < tile.columns; j++)
            if (!(std::fabs(w.rho[i * TILE + j]) <= T(limit[best]))) w.place[n++] = i * TILE + j;
    if (n) direct(p, tile, w, n);
    return 0;
}

template <class T> void write(const Pairs<T>& p, const Tile<T>& tile, TileSpace<T>& w) {
    const int64_t width = p.right.size;
    T* base = p.result + tile.batch * p.left.size * width;
    const bool on_diagonal = p.diagonal && tile.row == tile.column;
    if (on_diagonal) {
        for (int i = 0; i < tile.rows; i++) {
            for (int j = 0; j < i; j++) w.found[i * TILE + j] = w.found[j * TILE + i];
            w.found[i * TILE + i] = p.diagonal[tile.batch * p.left.size + tile.row + i];
        }
    }
    for (int i = 0; i < tile.rows; i++)
        std::memcpy(base + (tile.row + i) * width + tile.column, w.found + i * TILE,
                    tile.columns * sizeof(T));
    if (!p.diagonal || on_diagonal) return;
    constexpr int STRIP = 8;  // columns that are turned at a time: each is read once
    T turned[STRIP][TILE];
    for (int first = 0; first < tile.columns; first += STRIP) {
        for (int i = 0; i < tile.rows; i++)
            for (int k = 0; k < STRIP; k++) turned[k][i] = w.found[i * TILE + first + k];
        for (int k = 0; k < STRIP && first + k < tile.columns; k++)
            std::memcpy(base + (tile.column + first + k) * width + tile.row, turned[k],
                        tile.rows * sizeof(T));
    }
}

// Asks for large pages: filling fresh memory takes longer than computing what it is filled with.
inline void large_pages(void* start, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, first = (uintptr_t(start) + page - 1) / page * page;
    const uintptr_t end = (uintptr_t(start) + bytes) / page * page;
    if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

template <class T> int64_t pairs(const Pairs<T>& p, int threads) {
    large_pages(p.result, size_t(p.batch * p.left.size * p.right.size) * sizeof(T));
    const int64_t down = (p.left.size + TILE - 1) / TILE, across = (p.right.size + TILE - 1) / TILE;
    const int64_t each = p.diagonal ? down : down * across;  // a task is a row of tiles, or a tile
    std::atomic<int64_t> beyond{0};
    auto one = [&](int64_t batch, int64_t i, int64_t j, TileSpace<T>& w) {
        Tile<T> tile{batch, i * TILE, j * TILE, int(std::min<int64_t>(TILE, p.left.size - i * TILE)),
                     int(std::min<int64_t>(TILE, p.right.size - j * TILE))};
        beyond += compute(p, tile, w);
        write(p, tile, w);
    };
    run<TileSpace<T>>(p.batch * each, threads, [&](int64_t task, TileSpace<T>& w) {
        const int64_t batch = task / each, i = task % each;
        if (!p.diagonal) return one(batch, i / across, i % across, w);
        for (int64_t j = i; j < across; j++) one(batch, i, j, w);
    });
    return beyond;
}

// The largest |rho| of two elements, from the upper triangle.
template <class T>
double largest(int64_t batch, int64_t n, const T* covariance, int64_t matrix, int64_t stride, int threads) {
    const int64_t each = (n + TILE - 1) / TILE;
    std::vector<T> inverse(batch * n);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < n; i++) {
            const double variance = covariance[b * matrix + i * (stride + 1)];
            inverse[b * n + i] = T(variance > 0 ? 1 / std::sqrt(variance) : 0.0);
        }
    std::vector<T> found(batch * each, T(0));
    struct Space {};
    run<Space>(batch * each, threads, [&](int64_t task, Space&) {
        const int64_t b = task / each, first = task % each * TILE;
        Vec<T> most{};
        T rest = 0;
        for (int64_t i = first; i < std::min(n, first + TILE); i++) {
            const T* row = covariance + b * matrix + i * stride;
            const T *scale = inverse.data() + b * n, own = scale[i];
            int64_t j = i + 1;
            for (; j + WIDTH<T> <= n; j += WIDTH<T>)
                most = larger<Vec<T>>(most, absolute<T>(load(row + j) * own * load(scale + j)));
            for (; j < n; j++) rest = std::max(rest, std::fabs(row[j] * own * scale[j]));
        }
        for (int j = 0; j < WIDTH<T>; j++) rest = std::max(rest, most[j]);
        found[task] = rest;
    });
    return found.empty() ? 0.0 : double(*std::max_element(found.begin(), found.end()));
}
