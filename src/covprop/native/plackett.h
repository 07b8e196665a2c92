// K0 and K1 of kernels/plackett.py, for arrays of pairs, and their derivatives.
//
// The formulas, their regimes and constants are those of that file, where they are explained.
#pragma once

#include "lanes.h"

constexpr int CHUNK = 4096;  // pairs that are computed at a time
constexpr double SATURATION = 100.0;
constexpr double SWITCH = 0.7;
constexpr double TAIL = 8.0;

template <class T> struct Accuracy;
template <> struct Accuracy<double> {
    static constexpr int nodes = 12, terms = 14, tail_nodes = 24, gelu_nodes = 14;
    static constexpr double tail_depth = 36.0, smallest_exponent = -680.0;
};
template <> struct Accuracy<float> {
    static constexpr int nodes = 6, terms = 7, tail_nodes = 12, gelu_nodes = 6;
    static constexpr float tail_depth = 18.0f, smallest_exponent = -70.0f;
};

// Gauss-Legendre quadrature on [0, 1], by Newton's method for the roots of the polynomial.
template <int N> struct Rule {
    double node[N], weight[N];
    Rule() {
        for (int i = 0; i < N; i++) {
            double x = std::cos(PI * (N - i - 0.25) / (N + 0.5)), slope = 0;
            for (int step = 0; step < 8; step++) {
                double before = 1, value = x;
                for (int k = 1; k < N; k++) {
                    double next = ((2 * k + 1) * x * value - k * before) / (k + 1);
                    before = value;
                    value = next;
                }
                slope = N * (x * value - before) / (x * x - 1);
                x -= value / slope;
            }
            node[i] = (x + 1) / 2;
            weight[i] = 1 / ((1 - x * x) * slope * slope);
        }
    }
};
template <int N> static const Rule<N>& rule() {
    static const Rule<N> made;
    return made;
}

template <class T> INLINE T gap_to_one(T rho, T degenerate) {
    T gap = T(1) - std::fabs(rho);
    return gap > degenerate ? gap : T(0);
}

// 0 <= rho <= SWITCH: Gauss-Legendre in theta = arcsin r. Arrays are padded to whole vectors.
template <class T>
static void from_zero(const T* a, const T* b, const T* rho, T* first, T* second, int n) {
    constexpr int nodes = Accuracy<T>::nodes;
    const Rule<nodes>& gauss = rule<nodes>();
    FlushDenormals guard;
    for (int at = 0; at < n; at += WIDTH<T>) {
        Vec<T> x = load(a + at), y = load(b + at), end = load(rho + at);
        Vec<T> angle = arcsine(end), halves = (x * x + y * y) * T(0.5), product = x * y;
        Vec<T> k0{}, k1{};
        for (int i = 0; i < nodes; i++) {
            Vec<T> r = sine(angle * T(gauss.node[i]));
            Vec<T> exponent = (product * r - halves) / (T(1) - r * r);
            Vec<T> value = exponential<T>(exponent) * T(gauss.weight[i]);
            value = exponent < Accuracy<T>::smallest_exponent ? Vec<T>{} : value;
            k0 += value;
            k1 += value * (end - r);
        }
        Vec<T> scale = angle * T(1 / (2 * PI));
        store(first + at, k0 * scale);
        store(second + at, k1 * scale);
    }
}

// rho = 1 - gap near 1: the values at 1 less closed series in the gap.
template <class T>
static void from_one(const T* a, const T* b, const T* gap, T* first, T* second, int n) {
    FlushDenormals guard;
    for (int at = 0; at < n; at += WIDTH<T>) {
        Vec<T> x = load(a + at), y = load(b + at), width = load(gap + at);
        Vec<T> low = smaller<Vec<T>>(x, y), high = larger<Vec<T>>(x, y);
        Vec<T> at_one = cumulative<T>(low) * cumulative<T>(-high);
        Vec<T> outer = partial_expectation<T>(low) * partial_expectation<T>(-high);
        Mask<T> inside = width > T(0);
        Vec<T> g = inside ? width : all<T>(T(1));
        Vec<T> difference = (x - y) * (x - y) * T(0.25), total = (x + y) * (x + y) * T(0.25);
        Vec<T> ratio = smaller<Vec<T>>(difference / g, all<T>(T(SATURATION * SATURATION)));
        Vec<T> z = root<T>(ratio), decay = exponential<T>(-ratio), edge = root<T>(g);
        Vec<T> integral = T(2) * edge * decay * (T(1) - T(SQRT_PI) * z * erfcx(z));
        Vec<T> power = edge * g * decay, before{};
        Vec<T> taylor = exponential<T>(total * T(-0.5)) * T(SQRT_HALF), k0{}, k1{};
        for (int k = 0; k < Accuracy<T>::terms; k++) {
            Vec<T> following = (power - difference * integral) * T(1 / (k + 1.5));
            k0 += taylor * integral;
            k1 += taylor * (g * integral - following);
            integral = following;
            power = power * g;
            Vec<T> next = ((T(4 * k + 1) - total) * taylor - T(k - 0.5) * before) *
                          T(0.25 / (k + 1));
            before = taylor;
            taylor = next;
        }
        k0 = inside ? k0 * T(1 / (2 * PI)) : Vec<T>{};
        k1 = inside ? k1 * T(1 / (2 * PI)) : Vec<T>{};
        store(first + at, nonnegative<T>(at_one - k0));
        store(second + at, nonnegative<T>((T(1) - width) * at_one - outer + k1));
    }
}

// rho = 1 - gap near 1, a and b far from zero on the same side: positive, smooth integrands.
template <class T>
static void in_tail(const T* a, const T* b, const T* gap, T* first, T* second, int n) {
    constexpr int nodes = Accuracy<T>::tail_nodes;
    const Rule<nodes>& gauss = rule<nodes>();
    FlushDenormals guard;
    for (int at = 0; at < n; at += WIDTH<T>) {
        Vec<T> x = load(a + at), y = load(b + at), g = load(gap + at);
        Vec<T> difference = (x - y) * (x - y) * T(0.25), total = (x + y) * (x + y) * T(0.25);
        Vec<T> near = root<T>(difference);
        Vec<T> peak = larger<Vec<T>>(T(2) * near / (near + root<T>(total)), g);
        Vec<T> depth = Accuracy<T>::tail_depth + difference / peak;
        Vec<T> reach = T(2) - T(1) / (T(1) / (T(2) - peak) + depth / total);
        reach = smaller<Vec<T>>(reach, all<T>(T(1)));
        Vec<T> start = root<T>(g), width = root<T>(reach) - start, k0{}, k1{};
        for (int i = 0; i < nodes; i++) {
            Vec<T> v = start + width * T(gauss.node[i]), square = v * v, rest = T(2) - square;
            Vec<T> value = exponential<T>(-difference / square - total / rest) / root<T>(rest);
            value *= T(gauss.weight[i]);
            k0 += value;
            k1 += value * (square - g);
        }
        Vec<T> scale = width * T(1 / PI);
        store(first + at, k0 * scale);
        store(second + at, k1 * scale);
    }
}

// Single precision near rho = 1: far out, differences of probabilities need more digits than it has.
template <class Formula>
static void in_double(Formula formula, const float* a, const float* b, const float* gap, float* first,
                      float* second, int n) {
    constexpr int SOME = 64;
    double x[SOME], y[SOME], z[SOME], k0[SOME], k1[SOME];
    for (int at = 0; at < n; at += SOME) {
        const int count = n - at < SOME ? n - at : SOME;
        for (int i = 0; i < SOME; i++) {
            x[i] = i < count ? a[at + i] : 0.5;
            y[i] = i < count ? b[at + i] : 0.5;
            z[i] = i < count ? gap[at + i] : 0.5;
        }
        formula(x, y, z, k0, k1, count);
        for (int i = 0; i < count; i++) {
            first[at + i] = float(k0[i]);
            second[at + i] = float(k1[i]);
        }
    }
}
static void near_one(const double* a, const double* b, const double* gap, double* first, double* second, int n) {
    from_one(a, b, gap, first, second, n);
}
static void near_one(const float* a, const float* b, const float* gap, float* first, float* second, int n) {
    in_double(from_one<double>, a, b, gap, first, second, n);
}
static void far_out(const double* a, const double* b, const double* gap, double* first, double* second, int n) {
    in_tail(a, b, gap, first, second, n);
}
static void far_out(const float* a, const float* b, const float* gap, float* first, float* second, int n) {
    in_double(in_tail<double>, a, b, gap, first, second, n);
}

// Pairs of one regime, gathered from a chunk.
template <class T> struct Gathered {
    T a[CHUNK], b[CHUNK], last[CHUNK], first[CHUNK], second[CHUNK];
    int place[CHUNK];
    int count = 0;
    inline void push(T x, T y, T z, int at) {
        a[count] = x;
        b[count] = y;
        last[count] = z;
        place[count++] = at;
    }
    inline void pad() {  // to whole vectors, with numbers that are harmless everywhere
        for (int i = count; i % WIDTH<T>; i++) a[i] = b[i] = last[i] = T(0.5);
    }
};

// Buffers of one thread.
template <class T> struct Workspace {
    T a[CHUNK], b[CHUNK], rho[CHUNK], first[CHUNK], second[CHUNK];
    T flipped[CHUNK], size[CHUNK];
    Gathered<T> central, near, far;
};

// K0 and K1 of n <= CHUNK pairs; a, b, rho, first, second are those of the workspace.
template <class T> static void plackett(Workspace<T>& w, int n, T degenerate) {
    int padded = (n + WIDTH<T> - 1) / WIDTH<T> * WIDTH<T>;
    for (int i = n; i < padded; i++) w.a[i] = w.b[i] = w.rho[i] = T(0.5);
    bool central = true;
    for (int i = 0; i < padded; i++) {
        // K0(a, b, -rho) = -K0(a, -b, rho) and K1(a, b, -rho) = K1(a, -b, rho).
        w.size[i] = std::fabs(w.rho[i]);
        w.flipped[i] = w.rho[i] < 0 ? -w.b[i] : w.b[i];
        central &= w.size[i] <= T(SWITCH);
    }
    if (central) {
        from_zero(w.a, w.flipped, w.size, w.first, w.second, padded);
    } else {
        w.central.count = w.near.count = w.far.count = 0;
        for (int i = 0; i < n; i++) {
            T a = w.a[i], b = w.flipped[i];
            if (w.size[i] <= T(SWITCH)) {
                w.central.push(a, b, w.size[i], i);
                continue;
            }
            T gap = gap_to_one(w.rho[i], degenerate);
            ((a + b) * (a + b) * gap > T(TAIL) ? w.far : w.near).push(a, b, gap, i);
        }
        for (Gathered<T>* part : {&w.central, &w.near, &w.far}) {
            if (!part->count) continue;
            part->pad();
            const auto apply = [&](auto&& formula) {
                formula(part->a, part->b, part->last, part->first, part->second, part->count);
            };
            if (part == &w.central)
                apply(from_zero<T>);
            else if (part == &w.near)
                apply([](auto... x) { near_one(x...); });
            else
                apply([](auto... x) { far_out(x...); });
            for (int i = 0; i < part->count; i++) {
                w.first[part->place[i]] = part->first[i];
                w.second[part->place[i]] = part->second[i];
            }
        }
    }
    for (int i = 0; i < n; i++)
        if (w.rho[i] < 0) w.first[i] = -w.first[i];
}

template <class T> struct Degenerate {
    Mask<T> inside;
    Vec<T> gap, width, sign;
    INLINE Degenerate of(Vec<T> rho, T limit) {
        Degenerate d;
        d.sign = rho < T(0) ? all<T>(T(-1)) : all<T>(T(1));
        d.gap = T(1) - rho * d.sign;
        d.inside = d.gap > limit;
        d.gap = d.inside ? d.gap : Vec<T>{};
        d.width = d.inside ? d.gap : all<T>(T(1));
        return d;
    }
};

// phi(a) [Phi((b - rho a) / sqrt(1 - rho^2)) - Phi(b)]; at |rho| = 1 by its limit.
template <class T> INLINE Vec<T> shift(Vec<T> a, Vec<T> b, const Degenerate<T>& d) {
    Vec<T> limit = all<T>(T(SATURATION)), distance = b - d.sign * a + d.sign * d.gap * a;
    Vec<T> far = distance > T(0) ? limit : (distance < T(0) ? -limit : Vec<T>{});
    Vec<T> high = d.inside ? distance / root<T>(d.width * (T(2) - d.width)) : far;
    high = smaller<Vec<T>>(larger<Vec<T>>(high, -limit), limit);
    Vec<T> flip = high + b > T(0) ? all<T>(T(-1)) : all<T>(T(1));
    Vec<T> difference = flip * (cumulative<T>(flip * high) - cumulative<T>(flip * b));
    return bell<T>(a) * T(1 / SQRT_2PI) * difference;
}

// phi2(a, b; rho), zero where |rho| = 1.
template <class T>
INLINE Vec<T> bivariate_density(Vec<T> a, Vec<T> b, const Degenerate<T>& d) {
    Vec<T> other = T(2) - d.width, less = a - d.sign * b, more = a + d.sign * b;
    Vec<T> exponent = less * less / d.width + more * more / other;
    Vec<T> value = exponential<T>(exponent * T(-0.25)) / (T(2 * PI) * root<T>(d.width * other));
    return d.inside ? value : Vec<T>{};
}
