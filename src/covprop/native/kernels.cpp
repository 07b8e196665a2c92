// Covariances of pairs of activated Gaussians, one parallel region a call, behind a C interface.
//
// A library of this is built for each instruction set; covprop/kernels/compiled.py chooses one and
// calls it. Tensors are contiguous but for strides that are arguments; counts are in elements.

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "congruence.h"
#include "plackett.h"

namespace {

constexpr int TILE = 64;
static_assert(TILE * TILE == CHUNK, "a tile is a chunk");

// Calls task(number, workspace) for every number below count, each once, from several threads.
template <class W> void run(int64_t count, int threads, const std::function<void(int64_t, W&)>& task) {
    std::atomic<int64_t> next{0};
    auto work = [&] {
        static thread_local std::unique_ptr<W> workspace;  // kept: making it takes longer than a small call
        if (!workspace) workspace.reset(new W);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            task(i, *workspace);
    };
    threads = int(std::min<int64_t>(threads, count));
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
        try {
            others.emplace_back(work);
        } catch (...) {  // the system has no more threads: those that there are do it
            break;
        }
    }
    work();
    for (std::thread& one : others) one.join();
}

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
    std::vector<T> coefficients;
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
    T a[512];
    for (int i = 0; i < tile.rows; i++) {
        for (int k = 0; k < order; k++) a[k] = p.left.coefficients[k * p.left.all + first_row + i];
        T unit = p.left.units ? p.left.units[first_row + i] : T(1);
        T *rho = w.rho + i * TILE, *c = w.c + i * TILE, *found = w.found + i * TILE;
        {
            FlushDenormals guard;
            for (int j = 0; j < tile.columns; j += 2 * W) {
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
        for (int j = 0; j < tile.columns; j += W)
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
                Vec<T> r = sine<T>(angle * T(gauss.node[i])), rest = T(1) - r * r;
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
                Vec<T> inner = larger<Vec<T>>(move, Vec<T>{}) + edge * partial_expectation<T>(-z) -
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
            for (int j = 0; j < tile.columns; j++) w.place[n++] = i * TILE + j;
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
    double left[16], right[16], limit[16];
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
        for (int j = 0; j < tile.columns; j++)
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
    for (int j = 0; j < tile.columns; j++) {
        T* to = base + (tile.column + j) * width + tile.row;
        for (int i = 0; i < tile.rows; i++) to[i] = w.found[i * TILE + j];
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
double largest(int64_t batch, int64_t n, const T* covariance, const int64_t* strides, const T* inverse, int threads) {
    const int64_t each = (n + TILE - 1) / TILE;
    std::vector<T> found(batch * each, T(0));
    struct Space {};
    run<Space>(batch * each, threads, [&](int64_t task, Space&) {
        const int64_t b = task / each, first = task % each * TILE;
        Vec<T> most{};
        T rest = 0;
        for (int64_t i = first; i < std::min(n, first + TILE); i++) {
            const T* row = covariance + b * strides[0] + i * strides[1];
            const T *scale = inverse + b * n, own = scale[i];
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
    double least = result[0];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < m; i++) {
            const T variance = result[b * m * m + i * (m + 1)];
            if (!(variance >= least)) least = variance;
            if (variance != variance) return least;
        }
    return least;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define EXPORT(T, NAME)                                                                            \
    EXPORTED int64_t pairs_##NAME(const Pairs<T>* job, int threads) { return pairs(*job, threads); } \
    EXPORTED double largest_##NAME(int64_t batch, int64_t n, const T* covariance,                 \
                                   const int64_t* strides, const T* inverse, int threads) {        \
        return largest(batch, n, covariance, strides, inverse, threads);                           \
    }                                                                                              \
    EXPORTED void plackett_##NAME(const int64_t* shape, const Argument<T>* x, T* first, T* second, \
                                    double degenerate, int threads) {                              \
        plackett_all(shape, x, first, second, degenerate, threads);                                \
    }                                                                                              \
    EXPORTED void plackett_backward_##NAME(const int64_t* shape, const Argument<T>* x,           \
                                             T* const* to, double degenerate, int threads) {       \
        plackett_backward(shape, x, to, degenerate, threads);                                      \
    }                                                                                              \
    EXPORTED double congruence_##NAME(int64_t batch, int64_t m, int64_t n, const T* a, const T* s,  \
                                      T* result, int threads) {                                    \
        return congruences(batch, m, n, a, s, result, threads);                                    \
    }                                                                                              \
    EXPORTED void series_backward_##NAME(const SeriesBackward<T>* job, int threads) {            \
        series_backward(*job, threads);                                                            \
    }

EXPORT(float, float32)
EXPORT(double, float64)
