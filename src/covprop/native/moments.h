// Moments and Hermite coefficients of piecewise-linear functions, and what their series needs.
//
// In float64, element by element; the formulas are those of activations/knots.py and
// activations/correlated.py, where they are explained.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

// A call: what compiled.py has in a structure of the same layout. Rows of results have n elements.
struct PiecewiseCall {
    int64_t n, knots, order;
    const double *mean, *variance, *values;  // values: the function of the means
    const double *places, *slopes, *jumps;   // of knots; slopes are one more
    double saturation, narrow;
    double *centre, *output;                                       // mean and variance
    double *coefficients;                                          // a_k / sigma, (order, n)
    double *inverse, *slope, *density, *positions, *weights, *widths;  // of each element
};

// Returns whether a segment is too narrow for these formulas: nothing may be used then.
static bool piecewise(const PiecewiseCall& p) {
    typedef double T;
    constexpr int W = WIDTH<T>;
    const int64_t n = p.n, knots = p.knots;
    std::vector<T> roots(size_t(p.order) + 2), over(size_t(p.order) + 2);
    for (size_t k = 0; k < roots.size(); k++) {
        roots[k] = std::sqrt(double(k));
        over[k] = k ? 1 / roots[k] : 0;
    }
    for (int64_t at = 0; at < n; at += W) {
        const int count = int(std::min<int64_t>(W, n - at));
        auto read = [&](const T* from) {
            if (count == W) return load(from + at);
            T buffer[W] = {};
            std::memcpy(buffer, from + at, count * sizeof(T));
            return load(buffer);
        };
        auto write = [&](T* to, Vec<T> x) {
            if (count == W) return store(to + at, x);
            T buffer[W];
            store(buffer, x);
            std::memcpy(to + at, buffer, count * sizeof(T));
        };
        Vec<T> mean = read(p.mean), variance = read(p.variance);
        Mask<T> varies = variance > 0.0;
        Vec<T> sigma = varies ? root<T>(varies ? variance : all<T>(1.0)) : Vec<T>{};
        Vec<T> inverse = varies ? 1.0 / (varies ? sigma : all<T>(1.0)) : Vec<T>{};
        Vec<T> value = read(p.values) + 0.0 * mean, slope = all<T>(p.slopes[0]);  // NaN if infinite
        Vec<T> expected{}, lost{}, second{}, pure{}, mixed{}, bells{};
        for (int64_t t = 0; t < knots; t++) {
            Vec<T> distance = mean - p.places[t];
            Mask<T> above = distance >= 0.0, near = absolute<T>(distance) < p.saturation * sigma;
            Vec<T> far = above ? all<T>(p.saturation) : all<T>(-p.saturation);
            Vec<T> a = near ? distance / (near ? sigma : all<T>(1.0)) : far;
            Vec<T> size = absolute<T>(a), side = above ? all<T>(1.0) : all<T>(-1.0);
            Vec<T> scaled = size * SQRT_HALF, mills = erfcx(scaled), height = bell<T>(a);
            Vec<T> tail = 0.5 * height * mills, phi = height * (1 / SQRT_2PI);
            Vec<T> excess = phi * (1.0 - SQRT_PI * scaled * mills);
            const T weight = p.slopes[t + 1] - p.slopes[t], jump = p.jumps[t];
            slope = above ? all<T>(p.slopes[t + 1]) : slope;
            lost += weight * side * tail;
            expected += weight * sigma * excess - jump * side * tail;
            bells += jump * phi;
            write(p.positions + t * n, a);
            write(p.weights + t * n, weight * sigma);
            if (t + 1 < knots) {
                Vec<T> width = all<T>(p.saturation);
                const T length = p.places[t + 1] - p.places[t];
                if (p.slopes[t + 1] != 0) {
                    Mask<T> seen = length < p.saturation * sigma;
                    width = seen ? length / (seen ? sigma : all<T>(1.0)) : width;
                    for (int i = 0; i < count; i++)
                        if (width[i] < p.narrow) return true;
                }
                write(p.widths + t * n, width);
            }
            // K0 and K1 at rho = 1, with itself and twice with each knot before it.
            Vec<T> first = tail * (1.0 - tail);
            second += weight * weight * (first - excess * (size + excess));
            pure += jump * jump * first;
            if (jump != 0) {  // dK1/da of a knot with itself
                Vec<T> upper = above ? 1.0 - tail : tail;
                mixed += jump * weight * (a * first + phi * (1.0 - 2.0 * upper));
            }
            for (int64_t s = 0; s < t; s++) {  // mu - t falls with t: the one before is higher
                Vec<T> b = read(p.positions + s * n);
                const T other = p.slopes[s + 1] - p.slopes[s], step = p.jumps[s];
                Vec<T> k0 = cumulative<T>(a) * cumulative<T>(-b);
                Vec<T> k1 = k0 - partial_expectation<T>(a) * partial_expectation<T>(-b);
                second += 2.0 * weight * other * k1;
                pure += 2.0 * jump * step * k0;
                if (jump != 0 || step != 0) {
                    // The limits of dK0/da and dK0/db at rho = 1, a <= b.
                    Vec<T> by_a = phi * cumulative<T>(-b);
                    Vec<T> by_b = bell<T>(b) * (-1 / SQRT_2PI) * cumulative<T>(a);
                    by_a = a < b ? by_a : phi * (0.5 - cumulative<T>(b));
                    by_b = a < b ? by_b : phi * (0.5 - cumulative<T>(a));
                    mixed += jump * other * (b * k0 + by_b + by_a);
                    mixed += step * weight * (a * k0 + by_a + by_b);
                }
            }
        }
        slope -= lost;
        Vec<T> linear = slope * slope;
        Vec<T> total = variance * (linear + second) + pure + 2.0 * sigma * (mixed + slope * bells);
        total = varies ? total : variance * linear;
        write(p.centre, value + expected);
        write(p.output, nonnegative<T>(total));
        write(p.inverse, inverse);
        write(p.slope, slope);
        write(p.density, bells);
        if (!p.order) continue;
        write(p.coefficients, slope + bells * inverse);
        for (int64_t k = 1; k < p.order; k++) write(p.coefficients + k * n, Vec<T>{});
        for (int64_t t = 0; t < knots; t++) {
            Vec<T> a = read(p.positions + t * n), before{}, wave = bell<T>(a) * (1 / SQRT_2PI);
            const T weight = p.slopes[t + 1] - p.slopes[t], jump = p.jumps[t];
            for (int64_t k = 0; k + 1 < p.order; k++) {  // wave is He_k phi / sqrt(k!)
                const T sign = k % 2 ? -1 : 1;
                Vec<T> next = (a * wave - roots[size_t(k)] * before) * over[size_t(k + 1)];
                Vec<T> term = sign * weight * over[size_t(k + 1)] * over[size_t(k + 2)] * wave;
                if (jump != 0) term += -sign * jump * over[size_t(k + 2)] * next * inverse;
                write(p.coefficients + (k + 1) * n, read(p.coefficients + (k + 1) * n) + term);
                before = wave;
                wave = next;
            }
        }
    }
    return false;
}

struct SeriesCall {
    int64_t n, order;
    double* coefficients;  // in place: in their units, flushed
    const double *output, *variance;
    double *inverse, *units, *tails;
    const int64_t* ladder;
    int64_t steps, last;  // orders, and how many of the last coefficients bound those beyond
    double tiny, large, flush, largest, remainder;
};

// 1 / sigma, units of coefficients, those that are too small set to zero, and what is left after each
// order.
static void series_elements(const SeriesCall& p) {
    typedef double T;
    typedef Vec<T> V;
    constexpr int W = WIDTH<T>;
    const int64_t n = p.n;
    std::vector<T> least(static_cast<size_t>(p.order)), squares(static_cast<size_t>(p.order * W));
    const T first = std::pow(p.tiny, p.flush), growth = std::pow(std::max(p.largest, 0.01), -0.5);
    for (int64_t k = 0; k < p.order; k++) least[size_t(k)] = first * std::pow(growth, double(k));
    const T lowest = std::sqrt(p.tiny), low = std::pow(p.tiny, p.flush / 2), high = std::pow(p.large, 0.25);
    for (int64_t at = 0; at < n; at += W) {
        const int count = int(std::min<int64_t>(W, n - at));
        auto read = [&](const T* from) {
            if (count == W) return load(from + at);
            T buffer[W] = {};
            std::memcpy(buffer, from + at, count * sizeof(T));
            return load(buffer);
        };
        auto write = [&](T* to, V x) {
            if (count == W) return store(to + at, x);
            T buffer[W];
            store(buffer, x);
            std::memcpy(to + at, buffer, count * sizeof(T));
        };
        const V variance = read(p.variance);
        const Mask<T> varies = variance > 0.0;
        write(p.inverse, varies ? 1.0 / root<T>(varies ? variance : all<T>(1.0)) : V{});
        V most{}, sum{}, whole{}, latest{};
        for (int64_t k = 0; k < p.order; k++) most = larger<V>(absolute<T>(read(p.coefficients + k * n)), most);
        const V scale = 1.0 / larger<V>(most, all<T>(lowest));  // less is no unit in any case
        for (int64_t k = 0; k < p.order; k++) {
            const V share = read(p.coefficients + k * n) * scale;
            sum += share * share;
        }
        const V size = most * root<T>(sum);
        V unit = (size > lowest) & (size < low) ? size : all<T>(1.0);
        unit = size > high ? most : unit;
        write(p.units, unit);
        const V in_units = 1.0 / unit;
        for (int64_t k = 0; k < p.order; k++) {
            V c = read(p.coefficients + k * n) * in_units;
            c = absolute<T>(c) < least[size_t(k)] ? V{} : c;  // NaN stays
            write(p.coefficients + k * n, c);
            const V square = c * c;
            store(&squares[size_t(k * W)], square);
            whole += square;
            if (k >= p.order - p.last) latest = larger<V>(square, latest);
        }
        const V total = read(p.output) / unit / variance / unit;
        const Mask<T> positive = (total > 0.0) & (total < HUGE_VAL);
        const V divisor = positive ? total : all<T>(1.0);
        V beyond = nonnegative<T>(total - whole) + p.remainder * total;
        beyond = smaller<V>(beyond, 2.0 * double(p.order) * latest);
        for (int64_t k = p.order, step = p.steps - 1; step >= 0; step--) {
            for (; k > p.ladder[step]; k--) beyond += load(&squares[size_t((k - 1) * W)]);
            const V rest = positive ? beyond : V{};
            write(p.tails + step * n, root<T>(rest / divisor));
        }
    }
}
