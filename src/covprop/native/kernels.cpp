// The C interface of the compiled kernels.
//
// A library is built for each instruction set; covprop/kernels/compiled.py chooses one and calls it.
// Tensors are contiguous but for strides that are arguments; counts are in elements.

#include "congruence.h"
#include "convolution.h"
#include "elementwise.h"
#include "gradients.h"
#include "powers.h"
#include "products.h"
#include "quadrature.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define EXPORT(T, NAME)                                                                            \
    EXPORTED int64_t pairs_##NAME(const Pairs<T>* job, int threads) { return pairs(*job, threads); } \
    EXPORTED double largest_##NAME(int64_t batch, int64_t n, const T* covariance,                 \
                                   int64_t matrix, int64_t row, int threads) {                     \
        return largest(batch, n, covariance, matrix, row, threads);                                \
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
    EXPORTED double convolved_##NAME(const Convolution* f, int64_t batch, const T* weight, const T* s, \
                                     T* half, T* result, int threads) {                             \
        return convolved(*f, batch, weight, s, half, result, threads);                              \
    }                                                                                              \
    EXPORTED void product_##NAME(const Product<T>* job, int threads) { product_of(*job, threads); } \
    EXPORTED void power_series_##NAME(const PowerSeries<T>* job, int threads) {                   \
        power_series(*job, threads);                                                               \
    }                                                                                              \
    EXPORTED void slices_##NAME(int64_t batch, int64_t count, const Factors<T>* x,                \
                                const Factors<T>* z, T* result, int threads) {                     \
        slices(batch, count, *x, *z, result, threads);                                             \
    }                                                                                              \
    EXPORTED int64_t piecewise_layer_##NAME(const PiecewiseLayer* function, const Vectors<T>* x,   \
                                            const double* values, double* centre, T* result,        \
                                            int threads) {                                          \
        return piecewise_layer(*function, *x, values, centre, result, threads);                     \
    }                                                                                              \
    EXPORTED int64_t piecewise_layer_backward_##NAME(                                              \
        const PiecewiseLayer* function, const Vectors<T>* x, const double* by_centre,              \
        const T* by_result, double* to_mean, T* to_covariance, int threads) {                      \
        return piecewise_layer_backward(*function, *x, by_centre, by_result, to_mean,              \
                                        to_covariance, threads);                                   \
    }                                                                                              \
    EXPORTED void series_backward_##NAME(const SeriesBackward<T>* job, int threads) {            \
        series_backward(*job, threads);                                                            \
    }

EXPORT(float, float32)
EXPORT(double, float64)

EXPORTED int64_t piecewise_moments(const PiecewiseCall* call) { return piecewise(*call); }
EXPORTED int64_t piecewise_marginals_backward(
    const PiecewiseLayer* function, int64_t n, const double* mean, const double* variance,
    const double* by_centre, const double* by_output, double* to_mean, double* to_variance) {
    return piecewise_marginals_backward(*function, n, mean, variance, by_centre, by_output, to_mean, to_variance);
}
EXPORTED void kinked_powers(const KinkedPowers* call) {
    static const Binomials binomials;
    for (int64_t i = 0; i < call->n; i++) kinked_element(*call, binomials, i);
}
EXPORTED void series_numbers(const SeriesCall* call) { series_elements(*call); }
EXPORTED void quadrature_moments(const QuadratureCall* call, int threads) { quadrature(*call, threads); }
