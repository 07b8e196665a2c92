// A piecewise-linear function of Gaussian vectors: means and covariances in one call.
//
// For small layers, whose moments, series and pairs by themselves take less time than to call them.
#pragma once

#include "moments.h"
#include "pairs.h"

// What is the same of all calls of one function: compiled.py has it in the same layout.
struct PiecewiseLayer {
    int64_t knots;
    const double *places, *slopes, *jumps;  // no function with a jump comes here
    int64_t steps, last;
    const int64_t* ladder;  // orders that the series may have, or the one that is asked for
    int64_t bounded;        // whether the error of pairs is bounded, by a direct formula beyond the series
    int64_t few;            // pairs up to which the direct formula has all
    int64_t published;      // whether the truncated sum is the variance, too
    double saturation, narrow, fine, accuracy, direct_cost, degenerate;
    double tiny, large, flush, remainder;
};

// Vectors of (batch, n) elements, in their matrices.
template <class T> struct Vectors {
    int64_t batch, n;
    const double* mean;
    const T* covariance;
    int64_t matrix, row;  // strides
    int64_t all() const { return batch * n; }
    const T* variance(int64_t i) const { return covariance + i / n * matrix + i % n * (row + 1); }
};

// What moments.h computes of the elements.
struct Elements {
    int64_t order, steps;  // of the series, and of its ladder
    std::vector<double> space;
    double *variance, *output, *density, *width;
    double *inverse, *units, *numbers, *tails, *coefficients;
    int64_t count;  // numbers from `inverse` on: those that pairs read
};

// values: the function of the means; more: coefficients beyond the order. Returns whether these
// formulas do not hold, as where a segment is narrow against a deviation.
template <class T>
bool elements(const PiecewiseLayer& f, const Vectors<T>& x, const double* values, int64_t more,
              double* centre, Elements& e, int threads) {
    const int64_t all = x.all(), widths = f.knots - 1, own = 1 + 2 * f.knots;
    e.order = f.ladder[f.steps - 1];
    if (f.bounded && x.n * all <= f.few) {
        e.order = more = 0;
    } else if (f.bounded) {
        const double most = std::min(1.0, largest(x.batch, x.n, x.covariance, x.matrix, x.row, threads));
        for (int64_t k = f.steps - 1; k >= 0; k--)
            if (std::pow(most, double(f.ladder[k] + 1)) <= f.accuracy) e.order = f.ladder[k];
    }
    e.steps = 0;
    while (f.bounded && e.steps < f.steps && f.ladder[e.steps] <= e.order) e.steps++;
    const int64_t order = e.order + more;
    e.count = all * (2 + own + e.steps + order);
    e.space.resize(size_t(all * (3 + widths) + e.count));
    e.variance = e.space.data();
    e.output = e.variance + all;
    e.density = e.output + all;
    e.width = e.density + all;
    e.inverse = e.width + widths * all;
    e.units = e.inverse + all;
    e.numbers = e.units + all;  // the expected slope, positions and weights
    e.tails = e.numbers + own * all;
    e.coefficients = e.tails + e.steps * all;
    for (int64_t i = 0; i < all; i++) e.variance[i] = *x.variance(i);
    const PiecewiseCall moments{
        all, f.knots, order, x.mean, e.variance, values, f.places, f.slopes, f.jumps, f.saturation,
        f.narrow, centre, e.output, e.coefficients, e.inverse, e.numbers, e.density,
        e.numbers + all, e.numbers + (1 + f.knots) * all, e.width};
    if (piecewise(moments)) return true;
    for (int64_t t = 0; f.bounded && t < widths; t++)
        for (int64_t i = 0; f.slopes[t + 1] != 0 && i < all; i++)
            if (e.width[t * all + i] < f.fine) return true;
    for (int64_t i = 0; !f.bounded && i < all; i++) {
        double sum = 0;
        for (int64_t k = 0; k < e.order; k++) {
            const double c = e.coefficients[k * all + i];
            sum += c * (std::max(e.variance[i], 0.0) * c);
        }
        // Never below the truncated sum, or the matrix would not be positive semi-definite.
        if (f.published || !(sum < e.output[i])) e.output[i] = e.output[i] != e.output[i] ? e.output[i] : sum;
    }
    if (order)
        series_elements({all, order, e.coefficients, e.output, e.variance, e.inverse, e.units, e.tails,
                         f.ladder, e.steps, f.last, f.tiny, f.large, f.flush,
                         std::pow(f.accuracy, 1.0 / double(e.order + 1)), f.remainder});
    return false;
}

template <class T> const T* converted(const double* from, int64_t count, std::vector<T>& space) {
    if constexpr (sizeof(T) == sizeof(double)) return from;
    space.resize(size_t(count));
    for (int64_t i = 0; i < count; i++) space[size_t(i)] = T(from[i]);
    return space.data();
}

// Pairs of the elements, whose numbers stay in `space`; without a result yet.
template <class T>
Pairs<T> pairs_of(const PiecewiseLayer& f, const Vectors<T>& x, const Elements& e, std::vector<T>& space) {
    const T* numbers = converted<T>(e.inverse, e.count, space);
    const auto at = [&](const double* from) { return numbers + (from - e.inverse); };
    const Side<T> side{at(e.inverse), at(e.tails), at(e.coefficients), e.order ? at(e.units) : nullptr,
                       at(e.numbers), f.knots, x.n, x.all()};
    return {side, side, x.batch, x.covariance, x.matrix, x.row, nullptr, nullptr, e.order, f.ladder,
            e.steps, f.bounded ? KNOTS : NONE, f.accuracy, f.direct_cost, 0.0, f.degenerate};
}

// Means and covariances; returns whether the formulas do not hold: nothing is written then.
template <class T>
bool piecewise_layer(const PiecewiseLayer& f, const Vectors<T>& x, const double* values,
                     double* centre, T* result, int threads) {
    static thread_local Elements e;
    static thread_local std::vector<T> space, diagonal;
    if (elements(f, x, values, 0, centre, e, threads)) return true;
    diagonal.assign(e.output, e.output + x.all());
    Pairs<T> job = pairs_of(f, x, e, space);
    job.result = result;
    job.diagonal = diagonal.data();
    pairs(job, threads);
    return false;
}
