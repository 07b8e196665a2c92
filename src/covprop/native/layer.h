// A piecewise-linear function of Gaussian vectors: means and covariances in one call.
//
// For small layers, whose moments, series and pairs by themselves take less time than to call them.
#pragma once

#include "moments.h"
#include "pairs.h"

// What is the same of all calls of one function: compiled_layer.py has it in the same layout.
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

template <class T> const T* converted(const double* from, int64_t count, std::vector<T>& space) {
    if constexpr (sizeof(T) == sizeof(double)) return from;
    space.resize(size_t(count));
    for (int64_t i = 0; i < count; i++) space[size_t(i)] = T(from[i]);
    return space.data();
}

// mean, values: of (batch, n) elements, the latter the function of the means. Returns whether these
// formulas do not hold, as where a segment is narrow against a deviation: nothing is written then.
template <class T>
bool piecewise_layer(const PiecewiseLayer& f, int64_t batch, int64_t n, const double* mean,
                     const double* values, const T* covariance, int64_t matrix, int64_t row,
                     double* centre, T* result, int threads) {
    static thread_local std::vector<double> space;
    static thread_local std::vector<T> converted_space;
    const int64_t all = batch * n;
    int64_t order = f.ladder[f.steps - 1];
    if (f.bounded && n * all <= f.few) {
        order = 0;
    } else if (f.bounded) {
        const double most = std::min(1.0, largest(batch, n, covariance, matrix, row, threads));
        for (int64_t k = f.steps - 1; k >= 0; k--)
            if (std::pow(most, double(f.ladder[k] + 1)) <= f.accuracy) order = f.ladder[k];
    }
    int64_t steps = 0;
    while (f.bounded && steps < f.steps && f.ladder[steps] <= order) steps++;
    const int64_t widths = f.knots - 1, own = 1 + 2 * f.knots;
    space.resize(size_t(all * (5 + widths + own + steps + order)));
    double *variance = space.data(), *output = variance + all, *density = output + all;
    double *width = density + all, *inverse = width + widths * all, *units = inverse + all;
    double *numbers = units + all, *tails = numbers + own * all, *coefficients = tails + steps * all;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < n; i++) variance[b * n + i] = covariance[b * matrix + i * (row + 1)];
    const PiecewiseCall moments{
        all, f.knots, order, mean, variance, values, f.places, f.slopes, f.jumps, f.saturation, f.narrow,
        centre, output, coefficients, inverse, numbers, density,
        numbers + all, numbers + (1 + f.knots) * all, width};
    if (piecewise(moments)) return true;
    for (int64_t t = 0; f.bounded && t < widths; t++)
        for (int64_t i = 0; f.slopes[t + 1] != 0 && i < all; i++)
            if (width[t * all + i] < f.fine) return true;
    for (int64_t i = 0; !f.bounded && i < all; i++) {
        double sum = 0;
        for (int64_t k = 0; k < order; k++) {
            const double c = coefficients[k * all + i];
            sum += c * (std::max(variance[i], 0.0) * c);
        }
        // Never below the truncated sum, or the matrix would not be positive semi-definite.
        if (f.published || !(sum < output[i])) output[i] = output[i] != output[i] ? output[i] : sum;
    }
    if (order)
        series_elements({all, order, coefficients, output, variance, inverse, units, tails, f.ladder, steps,
                         f.last, f.tiny, f.large, f.flush,
                         std::pow(f.accuracy, 1.0 / double(order + 1)), f.remainder});
    const int64_t count = int64_t(space.size()) - (inverse - variance);
    const T* elements = converted<T>(inverse, count, converted_space);
    const auto at = [&](const double* numbers) { return elements + (numbers - inverse); };
    std::vector<T> diagonal(static_cast<size_t>(all));
    for (int64_t i = 0; i < all; i++) diagonal[size_t(i)] = T(output[i]);
    const Side<T> side{at(inverse), at(tails), at(coefficients), order ? at(units) : nullptr,
                       at(numbers), f.knots, n, all};
    pairs(Pairs<T>{side, side, batch, covariance, matrix, row, result, diagonal.data(), order, f.ladder,
                   steps, f.bounded ? KNOTS : NONE, f.accuracy, f.direct_cost, 0.0, f.degenerate},
          threads);
    return false;
}
