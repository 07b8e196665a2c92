// Vectors, in the compiler's own vector types, and the functions that kernels need.
//
// Operators work on all lanes; a comparison is a vector of -1 and 0, and `mask ? x : y` chooses
// lane by lane. A vector has the size of a register.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline))

template <class T> struct Lanes;
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr double shift = 0x1.8p52;  // adding it rounds to an integer, in the low bits
    static constexpr int mantissa = 52;
    static constexpr double least = -708.0;  // exp of less is denormal, taken as zero
    static constexpr double ln2_high = 6.93147180369123816490e-01;
    static constexpr double ln2_low = 1.90821492927058770002e-10;
    static constexpr int64_t upper_half = ~((int64_t(1) << 27) - 1);
};
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr float shift = 0x1.8p23f;
    static constexpr int mantissa = 23;
    static constexpr float least = -87.0f;
    static constexpr float ln2_high = 0.693359375f;
    static constexpr float ln2_low = -2.12194440e-4f;
    static constexpr int32_t upper_half = ~((int32_t(1) << 12) - 1);
};

template <class T> using Vec = typename Lanes<T>::V;
template <class T> using Mask = typename Lanes<T>::I;
template <class T> constexpr int WIDTH = VECTOR_BYTES / sizeof(T);

constexpr double PI = 3.141592653589793238462643383279502884;
constexpr double SQRT_HALF = 0.7071067811865475244008443621048490;
constexpr double SQRT_PI = 1.772453850905516027298167483341145;
constexpr double SQRT_2PI = 2.506628274631000502415765284811045;

template <class T> INLINE Vec<T> all(T x) { return x - Vec<T>{}; }
template <class T> INLINE Vec<T> load(const T* p) {
    Vec<T> x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class T> INLINE void store(T* p, Vec<T> x) { std::memcpy(p, &x, sizeof x); }

template <class V> INLINE V larger(V x, V y) { return x > y ? x : y; }
template <class V> INLINE V smaller(V x, V y) { return x < y ? x : y; }
template <class T> INLINE Vec<T> nonnegative(Vec<T> x) { return x < T(0) ? Vec<T>{} : x; }  // or NaN
template <class T> INLINE Vec<T> absolute(Vec<T> x) { return x < T(0) ? -x : x; }
template <class T> INLINE Vec<T> root(Vec<T> x) {
    Vec<T> y;
    for (int i = 0; i < WIDTH<T>; i++) y[i] = std::sqrt(x[i]);
    return y;
}

template <class T, int N> INLINE Vec<T> polynomial(const double (&c)[N], Vec<T> x) {
    Vec<T> sum = all<T>(T(c[N - 1]));
    for (int k = N - 2; k >= 0; k--) sum = sum * x + T(c[k]);
    return sum;
}

// (exp(x) - 1) / x and exp(x) for |x| <= log(2) / 2, by Chebyshev series.
INLINE Vec<double> small_quotient(Vec<double> x) {
    static const double c[] = {
        1.0, 0.50000000000000184798, 0.16666666666666702594, 0.041666666666487365514,
        0.0083333333333094301973, 0.0013888888952508690263, 0.00019841269909424065279,
        0.000024801485275248645436, 2.7557224767288022255e-6, 2.7632716110097872761e-7,
        2.5114933069618484361e-8};
    return polynomial<double>(c, x);
}
INLINE Vec<double> small_exponential(Vec<double> x) { return 1.0 + x * small_quotient(x); }
INLINE Vec<float> small_exponential(Vec<float> x) {
    static const double c[] = {
        0.99999999995938604849, 1.0000000378408942649, 0.50000001080733403348,
        0.16666414973759602081, 0.041666217375819997332, 0.0083751707862642055933,
        0.0013948640637153269053};
    return polynomial<float>(c, x);
}

// exp(x) for x <= 0; zero where it would be denormal.
template <class T> INLINE Vec<T> exponential(Vec<T> x) {
    using L = Lanes<T>;
    Mask<T> zero = x < L::least;
    x = zero ? all<T>(L::least) : x;
    Vec<T> shifted = x * T(1.44269504088896340736) + L::shift;
    Vec<T> n = shifted - L::shift;
    Vec<T> r = (x - n * L::ln2_high) - n * L::ln2_low;
    Vec<T> scaled = (Vec<T>)((Mask<T>)small_exponential(r) + ((Mask<T>)shifted << L::mantissa));
    return zero ? Vec<T>{} : scaled;
}

// exp(-z^2 / 2), accurate relative to itself: the square is taken in two parts.
template <class T> INLINE Vec<T> bell(Vec<T> z) {
    Vec<T> high = (Vec<T>)((Mask<T>)z & Lanes<T>::upper_half);
    Vec<T> low = (z - high) * (z + high) * T(-0.5);
    return exponential<T>(high * high * T(-0.5)) *
           (T(1) + low * (T(1) + low * (T(0.5) + low * T(1.0 / 6))));
}

// exp(x^2) erfc(x) for x >= 0: (1 + 2 x) times it is a Chebyshev series in (x - 4) / (x + 4).
INLINE Vec<double> erfcx(Vec<double> x) {
    static const double c[] = {
        1.232995118625552509, -0.1396211168405624964, 0.01537965210262002792,
        0.068097054254690390757, -0.1010390660363242939, 0.093732834998438215172,
        -0.066330365811664771972, 0.03716751553593086468, -0.016197734065765980562,
        0.0050319699926471187829, -0.00075777322081214486801, -0.00019925677560409391349,
        0.00015062131308880228312, -0.000024398945216240591412, -0.000011220770090828485853,
        5.7092078569683541652e-6, 2.9094003443016255407e-7, -8.2492300747046220315e-7,
        7.8887381722446936942e-8, 1.1010097873622605217e-7, -2.1872871304795083528e-8,
        -1.471212131111006871e-8, 3.9530260517808527108e-9, 1.7913737066801044113e-9,
        -5.3828807440931000003e-10, -1.3764810157072511221e-10, 4.1870142332342068597e-11};
    return polynomial<double>(c, (x - 4.0) / (x + 4.0)) / (1.0 + 2.0 * x);
}
INLINE Vec<float> erfcx(Vec<float> x) {
    static const double c[] = {
        1.23299511744, -0.139621113854, 0.0153797687233, 0.0680969414173, -0.101040940771,
        0.093734073444, -0.066319044089, 0.0371614828711, -0.0162303919834, 0.00504722928311,
        -0.000709132787248, -0.000220404494394, 0.000114208172842, -8.62530335293e-6};
    return polynomial<float>(c, (x - 4.0f) / (x + 4.0f)) / (1.0f + 2.0f * x);
}

// arcsin(x) for x^2 <= 0.495: a Chebyshev series of arcsin(x) / x in x^2.
INLINE Vec<double> arcsine(Vec<double> x) {
    static const double c[] = {
        1.0466608146346401913, 0.053060010386914868429, 0.0075992209080856493818,
        0.0014613834201095138816, 0.00032347531203066899566, 0.000077747555587090628506,
        0.000019724742018878851295, 5.1990569208098646792e-6, 1.4098671387920151595e-6,
        3.9081302665922498509e-7, 1.1024268261255118302e-7, 3.1543920473115841714e-8,
        9.1338622887149074016e-9, 2.6711991457140081023e-9, 7.8643003662036408564e-10,
        2.3353947302889634688e-10, 7.1548922404703829299e-11, 2.1622115960078850342e-11,
        5.2619643482921596848e-12, 1.5515300033416969708e-12, 1.0092906380310412736e-12,
        3.1761596746922008061e-13};
    return x * polynomial<double>(c, x * x * (1 / 0.2475) - 1.0);
}
INLINE Vec<float> arcsine(Vec<float> x) {
    static const double c[] = {
        1.0466608149076161664, 0.053060010826646160534, 0.0075992073872244104453,
        0.0014613747156946203902, 0.00032358197038312996676, 0.000077795556668652214384,
        0.000019432968192207042497, 5.0920996592763194217e-6, 1.7281860948670783721e-6,
        4.9246406773772342207e-7};
    return x * polynomial<float>(c, x * x * float(1 / 0.2475) - 1.0f);
}

// sin(x) for |x| <= 0.78, by a Chebyshev series of sin(x) / x in x^2.
INLINE Vec<double> sine(Vec<double> x) {
    static const double c[] = {
        0.99999999999999999714, -0.16666666666666620651, 0.0083333333333212292244,
        -0.00019841269829329030084, 2.7557313613699527021e-6, -2.5050754834370224743e-8,
        1.589698327385434133e-10};
    return x * polynomial<double>(c, x * x);
}
INLINE Vec<float> sine(Vec<float> x) {
    static const double c[] = {0.99999999708674972877, -0.16666651331898681393,
                               0.0083320714408243842798, -0.00019508548035996342361};
    return x * polynomial<float>(c, x * x);
}

// Phi(z), accurate relative to itself in the lower tail.
template <class T> INLINE Vec<T> cumulative(Vec<T> z) {
    Vec<T> tail = T(0.5) * bell<T>(z) * erfcx(absolute<T>(z) * T(SQRT_HALF));
    return z > T(0) ? T(1) - tail : tail;
}

// z Phi(z) + phi(z) = E[max(z + xi, 0)], accurate relative to itself.
template <class T> INLINE Vec<T> partial_expectation(Vec<T> z) {
    Vec<T> t = absolute<T>(z) * T(SQRT_HALF);
    Vec<T> below = bell<T>(z) * T(1 / SQRT_2PI) * (T(1) - T(SQRT_PI) * t * erfcx(t));
    return below + nonnegative<T>(z);
}

// Makes the processor take denormal results as zero, which are slow, until it is destroyed.
struct FlushDenormals {
#if defined(__SSE2__)
    unsigned saved = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(saved | 0x8000); }
    ~FlushDenormals() { _mm_setcsr(saved); }
#endif
};
