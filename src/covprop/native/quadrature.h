// Moments and Hermite coefficients of smooth scalar functions, by quadrature of the derivative.
//
// In float64, one element after the other; the formulas are those of activations/moments.py, where
// they are explained.
#pragma once

#include <algorithm>
#include <vector>

#include "threads.h"
#include "lanes.h"

enum Function { TANH, SIGMOID, SILU, SOFTPLUS, LOGSIGMOID, MISH, GELU_TANH, ELU, SQUARED_RELU };

constexpr int PANEL = 10;  // Gauss-Legendre nodes of a panel

// A call: what compiled_moments.py has in a structure of the same layout.
struct QuadratureCall {
    int64_t n, order, panels, function, kinks;
    const double *mean, *stddev, *centre;  // centre: g(mean)
    const double *parameters, *places;     // of the function; of its kinks
    const double *node, *weight, *cumulative;  // on [-1, 1]; integrals of the interpolant to nodes
    double reach, rounding, tiny;
    double *result, *variance, *mismatch, *floor, *by_mean, *by_variance, *coefficients;
    double* slopes;  // g' at the nodes, (n, nodes), where there are no kinks; or null
};

struct Value {
    Vec<double> at, slope;
};

// log(1 + e) for 0 <= e <= 1: a Chebyshev series of it over e.
INLINE Vec<double> log_of_more(Vec<double> e) {
    static const double c[] = {
        0.81093021621632876392, -0.14426354954966210181, 0.033152438438550995484,
        -0.0084610804138592324805, 0.0022882409076863474867, -0.00064215037271758826751,
        0.0001849030018879288007, -0.000054260895807245109537, 0.000016156948281755251034,
        -4.8668906251464343353e-6, 1.4798727003489474258e-6, -4.5350006579836588517e-7,
        1.3988899378054622976e-7, -4.3402665394258050556e-8, 1.353012366441597377e-8,
        -4.2202644569423613073e-9, 1.3247340104197840497e-9, -4.3450447140554015809e-10,
        1.3833926971931255971e-10, -3.2004721561235296719e-11, 9.7669476987191605426e-12,
        -7.8511884492333133767e-12, 2.5788419811519086253e-12};
    return e * polynomial<double>(c, 2.0 * e - 1.0);
}

// exp(x) - 1 for x <= 0, given exp(x): without cancellation near zero.
INLINE Vec<double> less_one(Vec<double> x, Vec<double> e) {
    Vec<double> near = x < -0.34 ? Vec<double>{} : x;
    return x < -0.34 ? e - 1.0 : near * small_quotient(near);
}

INLINE Value evaluated(int64_t function, const double* parameters, Vec<double> x) {
    typedef Vec<double> V;
    const V one = all<double>(1.0);
    const auto up = x > 0.0;
    if (function == TANH) {
        V e = exponential<double>(-2.0 * absolute<double>(x)), p = 1.0 / (1.0 + e);
        V t = -less_one(-2.0 * absolute<double>(x), e) * p;
        return {up ? t : -t, 4.0 * e * p * p};
    }
    if (function == SQUARED_RELU) {
        V y = up ? x : V{};
        return {y * y, 2.0 * y};
    }
    if (function == ELU) {
        const double alpha = parameters[0], scale = parameters[1], rate = parameters[2];
        V below = rate * (up ? V{} : x), e = exponential<double>(below);
        return {up ? scale * x : scale * alpha * less_one(below, e), up ? scale * one : scale * alpha * rate * e};
    }
    if (function == GELU_TANH) {
        const double root = 0.79788456080286535588, cubic = 0.044715;
        V u = root * (x + cubic * x * x * x), e = exponential<double>(-2.0 * absolute<double>(u));
        V p = 1.0 / (1.0 + e), t = (1.0 - e) * p, rest = 4.0 * e * p * p;
        t = up ? t : -t;
        return {0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * rest * root * (1.0 + 3.0 * cubic * x * x)};
    }
    V e = exponential<double>(-absolute<double>(x)), p = 1.0 / (1.0 + e);
    V s = up ? p : e * p, slope = e * p * p;
    if (function == SIGMOID) return {s, slope};
    if (function == SILU) return {x * s, s + x * slope};
    if (function == SOFTPLUS) return {nonnegative<double>(x) + log_of_more(e), s};
    if (function == LOGSIGMOID) return {-nonnegative<double>(-x) - log_of_more(e), up ? e * p : p};
    // Mish: x tanh(softplus(x)), with t = tanh(softplus(x)) and rest = 1 - t^2.
    V low = e * e + 2.0 * e, below = 1.0 / (low + 2.0), above = 1.0 / (1.0 + 2.0 * e + 2.0 * e * e);
    V t = up ? (1.0 + 2.0 * e) * above : low * below;
    V rest = up ? 4.0 * e * e * (1.0 + 2.0 * e + e * e) * above * above
                : 4.0 * (low + 1.0) * below * below;
    return {x * t, t + x * rest * s};
}

struct Grid {
    std::vector<double> breaks, x, weight, normal, value, slope, rise, wave, before;
    void resize(size_t count) {
        const size_t padded = (count + WIDTH<double> - 1) / WIDTH<double> * WIDTH<double>;
        for (auto* row : {&x, &weight, &normal, &value, &slope, &rise, &wave, &before})
            row->assign(padded, 0.0);
    }
};

static void integrate(const QuadratureCall& p, int64_t i, Grid& g) {
    constexpr int W = WIDTH<double>;
    typedef Vec<double> V;
    const double mean = p.mean[i], stddev = p.stddev[i], scale = stddev > 0 ? stddev : 1.0;
    g.breaks.clear();
    for (int64_t k = 0; k <= p.panels; k++)
        g.breaks.push_back(k == p.panels / 2 ? 0.0 : p.reach * (2.0 * double(k) / double(p.panels) - 1));
    for (int64_t k = 0; k < p.kinks; k++)
        g.breaks.push_back(std::min(p.reach, std::max(-p.reach, (p.places[k] - mean) / scale)));
    if (p.kinks) std::sort(g.breaks.begin(), g.breaks.end());
    const int64_t panels = int64_t(g.breaks.size()) - 1, count = panels * PANEL;
    g.resize(size_t(count));
    for (int64_t k = 0; k < panels; k++) {
        const double half = (g.breaks[k + 1] - g.breaks[k]) / 2, middle = (g.breaks[k + 1] + g.breaks[k]) / 2;
        for (int j = 0; j < PANEL; j++) {
            g.x[k * PANEL + j] = middle + half * p.node[j];
            g.weight[k * PANEL + j] = half * p.weight[j];
        }
    }
    for (int64_t k = 0; k < count; k += W) {
        V x = load(&g.x[k]);
        Value f = evaluated(p.function, p.parameters, mean + stddev * x);
        V phi = bell<double>(x) * (1 / SQRT_2PI);
        store(&g.value[k], f.at);
        store(&g.slope[k], f.slope);
        store(&g.wave[k], phi);
        store(&g.normal[k], load(&g.weight[k]) * phi);
    }
    // g(y) - g(mu), summed outwards from zero on either side.
    auto panel = [&](int64_t k, double from) {
        const double half = (g.breaks[k + 1] - g.breaks[k]) / 2;
        for (int j = 0; j < PANEL; j++) {
            double sum = 0;
            for (int l = 0; l < PANEL; l++) sum += p.cumulative[j * PANEL + l] * g.slope[k * PANEL + l];
            g.rise[k * PANEL + j] = stddev * (from + half * sum);
        }
    };
    auto total = [&](int64_t k) {
        double sum = 0;
        for (int j = 0; j < PANEL; j++) sum += g.weight[k * PANEL + j] * g.slope[k * PANEL + j];
        return sum;
    };
    int64_t centre = 0;
    while (centre < panels && g.breaks[centre + 1] + g.breaks[centre] <= 0) centre++;
    double sum = 0;
    for (int64_t k = centre; k < panels; k++) {
        panel(k, sum);
        sum += total(k);
    }
    sum = 0;
    for (int64_t k = centre - 1; k >= 0; k--) {
        sum += total(k);
        panel(k, -sum);
    }
    auto expect = [&](auto&& function) {
        V sums{};
        for (int64_t k = 0; k < count; k += W) sums += function(k) * load(&g.normal[k]);
        double result = 0;
        for (int j = 0; j < W; j++) result += sums[j];
        return result;
    };
    const double at = p.centre[i];
    const double shift = expect([&](int64_t k) { return load(&g.rise[k]); });
    const double variance = expect([&](int64_t k) {
        V d = load(&g.rise[k]) - shift;
        return d * d;
    });
    const double square = expect([&](int64_t k) { return load(&g.value[k]) * load(&g.value[k]); });
    const double size = square + (std::fabs(mean) + stddev) * (std::fabs(mean) + stddev);
    const double floor = p.rounding * p.rounding * size + p.tiny;
    const double distance = expect([&](int64_t k) {
        V d = load(&g.value[k]) - at - load(&g.rise[k]);
        return d * d;
    });
    const double excess = distance > floor ? distance - floor : (distance != distance ? distance : 0.0);
    const double by_variance = expect([&](int64_t k) {
        return (load(&g.rise[k]) - shift) * load(&g.slope[k]) * load(&g.x[k]);
    });
    const double slope = expect([&](int64_t k) { return load(&g.slope[k]); });
    p.result[i] = at + shift;
    p.variance[i] = variance;
    p.mismatch[i] = excess == 0 ? 0.0 : std::sqrt(excess / (variance > 0 ? variance : excess));
    p.floor[i] = floor;
    p.by_mean[i] = 2 * expect([&](int64_t k) { return (load(&g.rise[k]) - shift) * load(&g.slope[k]); });
    p.by_variance[i] = stddev > 0 ? by_variance / stddev : slope * slope;
    if (p.slopes) {  // coefficients are a matrix product of them
        std::memcpy(p.slopes + i * count, g.slope.data(), size_t(count) * sizeof(double));
        return;
    }
    for (int64_t k = 0; k < p.order; k++) {  // wave is He_k phi / sqrt(k!)
        V sums{};
        const double up = 1 / std::sqrt(k + 1.0), down = std::sqrt(double(k)) * up;
        for (int64_t j = 0; j < count; j += W) {
            V wave = load(&g.wave[j]);
            sums += load(&g.slope[j]) * load(&g.weight[j]) * wave;
            V next = up * load(&g.x[j]) * wave - down * load(&g.before[j]);
            store(&g.before[j], wave);
            store(&g.wave[j], next);
        }
        double result = 0;
        for (int j = 0; j < W; j++) result += sums[j];
        p.coefficients[k * p.n + i] = result * up;
    }
}

static void quadrature(const QuadratureCall& p, int threads) {
    constexpr int64_t some = 8;  // elements of a task
    run<Grid>((p.n + some - 1) / some, threads, [&](int64_t task, Grid& g) {
        for (int64_t i = task * some; i < std::min(p.n, (task + 1) * some); i++) integrate(p, i, g);
    });
}
