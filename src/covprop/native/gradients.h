// The backward pass of a piecewise-linear function of Gaussian vectors.
//
// With C = Cov(g(y), g(z)) (Price 1958): by the covariance of y and z it is E[g'(y) g'(z)], by the
// mean of y Cov(g'(y), g(z)), and by the variance of y half of Cov(g''(y), g(z)).
#pragma once

#include "layer.h"

// What a pair adds, for a tile: by its covariance, by means and by variances of row and column.
template <class T> struct PairGradients {
    T by_covariance[CHUNK], by_mean[2][CHUNK], by_variance[2][CHUNK];
};

template <class T> struct GradientSpace {
    TileSpace<T> tile;
    PairGradients<T> found;
    T gradient[CHUNK], deviation[2][TILE];
    std::vector<T> columns[3], rows[4], factors[3];
    T numbers[8][CHUNK];
};

// Sums over k <= order of rho^k times coefficients a_k / sigma of row and column.
template <class T>
void series_gradients(const Pairs<T>& p, const Tile<T>& tile, GradientSpace<T>& w, int order) {
    constexpr int W = WIDTH<T>;
    FlushDenormals guard;
    const int64_t start[2] = {tile.batch * p.left.size + tile.row, tile.batch * p.left.size + tile.column};
    const auto coefficient = [&](int64_t k, int64_t i) { return p.left.coefficients[k * p.left.all + i]; };
    for (auto& one : w.columns) one.assign(size_t(order) * TILE, T(0));
    for (auto& one : w.rows) one.resize(size_t(order));
    for (auto& one : w.factors) one.resize(size_t(order));
    for (int k = 0; k < order; k++) {  // of derivatives: sqrt((k + 1) ... (k + d)), counted from one
        w.factors[0][size_t(k)] = T(1);
        w.factors[1][size_t(k)] = T(std::sqrt(k + 2.0));
        w.factors[2][size_t(k)] = T(0.5 * std::sqrt((k + 2.0) * (k + 3.0)));
        for (int d = 0; d < 3; d++)
            for (int j = 0; j < tile.columns; j++)
                w.columns[d][size_t(k * TILE + j)] = w.factors[d][size_t(k)] * coefficient(k + d, start[1] + j);
    }
    for (int i = 0; i < tile.rows; i++) {
        for (int k = 0; k < order; k++) {
            for (int d = 0; d < 3; d++)
                w.rows[d][size_t(k)] = w.factors[d][size_t(k)] * coefficient(k + d, start[0] + i);
            w.rows[3][size_t(k)] = T(k + 1) * w.rows[0][size_t(k)];
        }
        const T unit = p.left.units[start[0] + i], sigma = w.deviation[0][i], inverse = p.left.inverse[start[0] + i];
        for (int j = tile.row == tile.column ? i / W * W : 0; j < tile.columns; j += W) {
            const int at = i * TILE + j;
            const Vec<T> rho = load(w.tile.rho + at);
            Vec<T> slopes{}, first{}, second{}, third{}, fourth{};
            for (int k = order - 1; k >= 0; k--) {
                const size_t column = size_t(k * TILE + j);
                const Vec<T> b = load(&w.columns[0][column]);
                slopes = slopes * rho + w.rows[3][size_t(k)] * b;
                first = first * rho + w.rows[1][size_t(k)] * b;
                second = second * rho + w.rows[0][size_t(k)] * load(&w.columns[1][column]);
                third = third * rho + w.rows[2][size_t(k)] * b;
                fourth = fourth * rho + w.rows[0][size_t(k)] * load(&w.columns[2][column]);
            }
            const Vec<T> units = unit * load(w.tile.units + j), other = load(w.deviation[1] + j);
            store(w.found.by_covariance + at, slopes * units);
            store(w.found.by_mean[0] + at, first * rho * units * other);
            store(w.found.by_mean[1] + at, second * rho * units * sigma);
            store(w.found.by_variance[0] + at, third * rho * units * other * inverse);
            store(w.found.by_variance[1] + at, fourth * rho * units * sigma * load(w.tile.inverse + j));
        }
    }
}

// E[relu(b + eta) | xi = -a] - E[relu(b + eta)] for a correlation rho.
template <class T> INLINE Vec<T> conditional(Vec<T> a, Vec<T> b, Vec<T> rho, Vec<T> edge) {
    const Vec<T> move = b - rho * a, size = absolute<T>(move);
    const Mask<T> near = size < T(SATURATION) * edge;
    const Vec<T> z = near ? size / (near ? edge : all<T>(T(1))) : all<T>(T(SATURATION));
    return nonnegative<T>(move) + edge * partial_expectation<T>(-z) - partial_expectation<T>(b);
}

// The same by closed forms of n pairs, at w.tile.place.
template <class T>
void direct_gradients(const PiecewiseLayer& f, const Pairs<T>& p, const Tile<T>& tile, GradientSpace<T>& w, int n) {
    constexpr int W = WIDTH<T>;
    Workspace<T>& s = w.tile.pairs;
    PairGradients<T>& to = w.found;
    const int* place = w.tile.place;
    const int64_t start[2] = {tile.batch * p.left.size + tile.row, tile.batch * p.left.size + tile.column};
    const auto gather = [&](const T* from, int side, T* into) {
        for (int i = 0; i < n; i++) into[i] = from[start[side] + (side ? place[i] % TILE : place[i] / TILE)];
        for (int i = n; i % W; i++) into[i] = T(0.5);
    };
    T *one[2] = {w.numbers[0], w.numbers[1]}, *other[2] = {w.numbers[2], w.numbers[3]};
    for (int side = 0; side < 2; side++) gather(p.left.numbers, side, other[side]);
    for (int i = 0; i < n; i++) {
        to.by_covariance[place[i]] = other[0][i] * other[1][i];
        for (int side = 0; side < 2; side++) to.by_mean[side][place[i]] = to.by_variance[side][place[i]] = 0;
    }
    const auto scale = [&](int side, int i) {  // sigma of the other element, and 1 / sigma
        const int own = side ? place[i] % TILE : place[i] / TILE, far = side ? place[i] / TILE : place[i] % TILE;
        return std::pair<T, T>(w.deviation[1 - side][far], p.left.inverse[start[side] + own]);
    };
    for (int side = 0; side < 2; side++)  // what is linear in the other element
        for (int64_t t = 0; t < f.knots; t++) {
            const T step = T(f.slopes[t + 1] - f.slopes[t]), before = T(f.slopes[0]);
            gather(p.left.numbers + (1 + t) * p.left.all, side, one[0]);
            for (int i = 0; i < n; i += W) store(one[1] + i, bell<T>(load(one[0] + i)) * T(1 / SQRT_2PI));
            for (int i = 0; i < n; i++) {
                const auto [sigma, inverse] = scale(side, i);
                const T share = step * one[1][i] * sigma * w.tile.rho[place[i]];
                to.by_mean[side][place[i]] += share * other[1 - side][i];
                to.by_variance[side][place[i]] -= T(0.5) * share * before * one[0][i] * inverse;
            }
        }
    for (int64_t t = 0; t < f.knots; t++)
        for (int64_t u = 0; u < f.knots; u++) {
            const T weight = T((f.slopes[t + 1] - f.slopes[t]) * (f.slopes[u + 1] - f.slopes[u]));
            gather(p.left.numbers + (1 + t) * p.left.all, 0, s.a);
            gather(p.left.numbers + (1 + u) * p.left.all, 1, s.b);
            for (int i = 0; i < n; i++) s.rho[i] = w.tile.rho[place[i]];
            plackett(s, n, T(p.degenerate));
            T* out[4] = {w.numbers[4], w.numbers[5], w.numbers[6], w.numbers[7]};
            for (int i = 0; i < n; i += W) {
                const Vec<T> a = load(s.a + i), b = load(s.b + i), rho = load(s.rho + i), first = load(s.first + i);
                const Degenerate<T> d = Degenerate<T>::of(rho, T(p.degenerate));
                const Vec<T> edge = d.inside ? root<T>(d.width * (T(2) - d.width)) : Vec<T>{};
                const Vec<T> by_a = shift<T>(a, b, d), by_b = shift<T>(b, a, d);
                store(out[0] + i, b * first + by_b + rho * by_a);
                store(out[1] + i, a * first + by_a + rho * by_b);
                store(out[2] + i, bell<T>(a) * T(1 / SQRT_2PI) * conditional<T>(a, b, rho, edge));
                store(out[3] + i, bell<T>(b) * T(1 / SQRT_2PI) * conditional<T>(b, a, rho, edge));
            }
            for (int i = 0; i < n; i++) {
                to.by_covariance[place[i]] += weight * s.first[i];
                for (int side = 0; side < 2; side++) {
                    const auto [sigma, inverse] = scale(side, i);
                    to.by_mean[side][place[i]] += weight * sigma * out[side][i];
                    to.by_variance[side][place[i]] += T(0.5) * weight * sigma * inverse * out[2 + side][i];
                }
            }
        }
}

// Fills `found` for a tile: by the shortest series that reaches all pairs, or the longest and closed
// forms beyond it.
template <class T>
void pair_gradients(const PiecewiseLayer& f, const Pairs<T>& p, const Tile<T>& tile, GradientSpace<T>& w) {
    const int64_t start[2] = {tile.batch * p.left.size + tile.row, tile.batch * p.left.size + tile.column};
    const bool on_diagonal = tile.row == tile.column;
    for (int side = 0; side < 2; side++)
        for (int j = 0; j < TILE; j++) {
            const bool inside = j < (side ? tile.columns : tile.rows);
            const T inverse = inside ? p.left.inverse[start[side] + j] : T(0);
            w.deviation[side][j] = inverse > 0 ? 1 / inverse : T(0);
            if (side) w.tile.inverse[j] = inverse;
            if (side) w.tile.units[j] = inside && p.left.units ? p.left.units[start[1] + j] : T(1);
        }
    Vec<T> largest{};
    for (int i = 0; i < tile.rows; i++) {
        const T* from = p.covariance + tile.batch * p.covariance_batch + (tile.row + i) * p.covariance_row + tile.column;
        const T inverse = p.left.inverse[start[0] + i];
        T* rho = w.tile.rho + i * TILE;
        const int first = on_diagonal ? i + 1 : 0;
        std::fill(rho, rho + TILE, T(0));
        for (int j = first; j < tile.columns; j++) rho[j] = from[j];
        for (int j = 0; j < TILE; j += WIDTH<T>) {
            const Vec<T> r = load(rho + j) * inverse * load(w.tile.inverse + j);
            store(rho + j, r);
            largest = larger<Vec<T>>(absolute<T>(r), largest);
        }
    }
    double most = 0;
    for (int j = 0; j < WIDTH<T>; j++) most = std::max(most, double(largest[j]));
    int n = 0;
    double limit = -1;
    if (p.order) {
        double left[MOST_STEPS], right[MOST_STEPS];
        heights(p.left, start[0], tile.rows, int(p.steps), left);
        heights(p.left, start[1], tile.columns, int(p.steps), right);
        int64_t step = -1;
        do {
            step++;
            limit = std::exp((std::log(p.accuracy) - left[step] - right[step]) / double(p.ladder[step] + 1));
        } while (!(most <= limit) && step + 1 < p.steps);
        series_gradients(p, tile, w, int(p.ladder[step]));
    } else {  // what other calls have left is multiplied by gradients that are zero, and may be no number
        PairGradients<T>& to = w.found;
        for (T* left : {to.by_covariance, to.by_mean[0], to.by_mean[1], to.by_variance[0], to.by_variance[1]})
            std::fill(left, left + tile.rows * TILE, T(0));
    }
    if (most <= limit) return;
    for (int i = 0; i < tile.rows; i++)
        for (int j = on_diagonal ? i + 1 : 0; j < tile.columns; j++)
            if (!(std::fabs(w.tile.rho[i * TILE + j]) <= T(limit))) w.tile.place[n++] = i * TILE + j;
    if (n) direct_gradients(f, p, tile, w, n);
}

// Adds to the gradients of means and variances what the gradients of means and variances add.
inline void marginal_gradients(const PiecewiseLayer& f, int64_t n, const double* mean, const double* variance,
                               const double* inverse, const double* slope, const double* positions,
                               const double* by_centre, const double* by_output, double* to_mean, double* to_variance) {
    typedef double T;
    constexpr int W = WIDTH<T>;
    for (int64_t at = 0; at < n; at += W) {
        const int count = int(std::min<int64_t>(W, n - at));
        const auto read = [&](const T* from) {
            T buffer[W] = {};
            std::memcpy(buffer, from + at, count * sizeof(T));
            return load(buffer);
        };
        const auto add = [&](T* to, Vec<T> x) {
            for (int i = 0; i < count; i++) to[at + i] += x[i];
        };
        const Vec<T> mu = read(mean), over = read(inverse), expected = read(slope);
        const Vec<T> sigma = read(variance) * over;
        Vec<T> bells{}, squares = all<T>(f.slopes[0] * f.slopes[0]), by_mean{}, by_variance{};
        for (int64_t t = 0; t < f.knots; t++) {
            const T weight = f.slopes[t + 1] - f.slopes[t], place = f.places[t];
            const Vec<T> a = read(positions + t * n), phi = bell<T>(a) * (1 / SQRT_2PI);
            const Vec<T> below = cumulative<T>(-a), above = cumulative<T>(a);
            squares += (f.slopes[t + 1] * f.slopes[t + 1] - f.slopes[t] * f.slopes[t]) * above;
            bells += weight * phi;
            // Cov(1(y > t), g(y)), and g(t) - E[g(y)].
            Vec<T> step = f.slopes[0] * sigma * phi, gap = f.slopes[0] * (place - mu);
            for (int64_t u = 0; u < f.knots; u++) {
                const T other = f.slopes[u + 1] - f.slopes[u];
                const Vec<T> b = read(positions + u * n), up = partial_expectation<T>(b);
                if (u < t) step += other * sigma * (phi - above * partial_expectation<T>(-b));
                else step += other * sigma * up * below;
                // E[relu(y - u)]; positions are saturated, far from a knot.
                const Vec<T> rest = sigma * partial_expectation<T>(-absolute<T>(b));
                gap += other * (std::max(place - f.places[u], 0.0) - nonnegative<T>(mu - f.places[u]) - rest);
            }
            by_mean += 2.0 * weight * step;
            by_variance += weight * phi * over * gap;
        }
        const Mask<T> varies = read(variance) > 0.0;
        const Vec<T> gradient = read(by_output), centre = read(by_centre);
        const Vec<T> spread = varies ? squares + by_variance : expected * expected;
        add(to_mean, centre * expected + (varies ? gradient * by_mean : Vec<T>{}));
        add(to_variance, varies ? centre * 0.5 * bells * over + gradient * spread : gradient * spread);
    }
}

// The same of n elements without their covariances.
inline bool piecewise_marginals_backward(const PiecewiseLayer& f, int64_t n, const double* mean,
                                         const double* variance, const double* by_centre,
                                         const double* by_output, double* to_mean, double* to_variance) {
    std::vector<double> space(static_cast<size_t>(n * (5 + 3 * f.knots)));
    double *centre = space.data(), *output = centre + n, *density = output + n, *inverse = density + n;
    double *slope = inverse + n, *positions = slope + n, *weights = positions + f.knots * n;
    const PiecewiseCall moments{n, f.knots, 0, mean, variance, mean, f.places, f.slopes, f.jumps,
                                f.saturation, f.narrow, centre, output, nullptr, inverse, slope, density,
                                positions, weights, weights + f.knots * n};
    if (piecewise(moments)) return true;
    std::fill(to_mean, to_mean + n, 0.0);
    std::fill(to_variance, to_variance + n, 0.0);
    marginal_gradients(f, n, mean, variance, inverse, slope, positions, by_centre, by_output, to_mean, to_variance);
    return false;
}

// Gradients of means (batch, n) and covariances, from those of the results; by_result is contiguous.
template <class T>
bool piecewise_layer_backward(const PiecewiseLayer& f, const Vectors<T>& x, const double* by_centre,
                              const T* by_result, double* to_mean, T* to_covariance, int threads) {
    static thread_local Elements e;
    static thread_local std::vector<T> space;
    const int64_t n = x.n, all = x.all(), across = (n + TILE - 1) / TILE;
    std::vector<double> centre(static_cast<size_t>(all)), output(static_cast<size_t>(all));
    if (elements(f, x, x.mean, 2, centre.data(), e, threads)) return true;
    const Pairs<T> p = pairs_of(f, x, e, space);
    // Gradients of means, then of variances, by each row of tiles: threads write to their own.
    std::vector<double> sums(static_cast<size_t>(across * 2 * all), 0.0);
    run<GradientSpace<T>>(x.batch * across, threads, [&](int64_t task, GradientSpace<T>& w) {
        const int64_t batch = task / across, down = task % across;
        double* by_mean = sums.data() + down * 2 * all + batch * n;
        double* by_variance = by_mean + all;
        for (int64_t j = down; j < across; j++) {
            const Tile<T> tile{batch, down * TILE, j * TILE, int(std::min<int64_t>(TILE, n - down * TILE)),
                               int(std::min<int64_t>(TILE, n - j * TILE))};
            pair_gradients(f, p, tile, w);
            const T* upper = by_result + batch * n * n + tile.row * n + tile.column;
            const T* lower = by_result + batch * n * n + tile.column * n + tile.row;
            T* to_upper = to_covariance + batch * n * n + tile.row * n + tile.column;
            T* to_lower = to_covariance + batch * n * n + tile.column * n + tile.row;
            for (int i = 0; i < tile.rows; i++)
                for (int k = 0; k < TILE; k++) {
                    const bool pair = k < tile.columns && (down != j || k > i);
                    w.gradient[i * TILE + k] = pair ? upper[i * n + k] + lower[k * n + i] : T(0);
                }
            T columns[2][TILE] = {};
            for (int i = 0; i < tile.rows; i++) {
                Vec<T> row[2] = {};
                for (int k = down == j ? i / WIDTH<T> * WIDTH<T> : 0; k < tile.columns; k += WIDTH<T>) {
                    const int at = i * TILE + k;
                    const Vec<T> gradient = load(w.gradient + at);
                    T* share = w.found.by_covariance + at;
                    store(share, T(0.5) * gradient * load(share));
                    row[0] += gradient * load(w.found.by_mean[0] + at);
                    row[1] += gradient * load(w.found.by_variance[0] + at);
                    store(columns[0] + k, load(columns[0] + k) + gradient * load(w.found.by_mean[1] + at));
                    store(columns[1] + k, load(columns[1] + k) + gradient * load(w.found.by_variance[1] + at));
                }
                for (int k = 0; k < WIDTH<T>; k++) {
                    by_mean[tile.row + i] += row[0][k];
                    by_variance[tile.row + i] += row[1][k];
                }
                const T* shares = w.found.by_covariance + i * TILE;
                for (int k = down == j ? i + 1 : 0; k < tile.columns; k++)
                    to_upper[i * n + k] = to_lower[k * n + i] = shares[k];
            }
            for (int k = 0; k < tile.columns; k++) {
                by_mean[tile.column + k] += columns[0][k];
                by_variance[tile.column + k] += columns[1][k];
            }
        }
    });
    for (int64_t i = 0; i < all; i++) {
        output[size_t(i)] = by_result[i / n * n * n + i % n * (n + 1)];
        to_mean[i] = centre[size_t(i)] = 0;
        for (int64_t k = 0; k < across; k++) {
            to_mean[i] += sums[size_t(k * 2 * all + i)];
            centre[size_t(i)] += sums[size_t((k * 2 + 1) * all + i)];
        }
    }
    marginal_gradients(f, all, x.mean, e.variance, e.inverse, e.numbers, e.numbers + all, by_centre,
                       output.data(), to_mean, centre.data());
    for (int64_t i = 0; i < all; i++) to_covariance[i / n * n * n + i % n * (n + 1)] = T(centre[size_t(i)]);
    return false;
}
