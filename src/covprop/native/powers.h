// Expected derivatives of the powers of functions with one kink: kinked_powers in normal.py, whose
// names these are, element by element.
#pragma once

#include <cstdint>

namespace {

constexpr int POWERS = 4, LENGTH = 24;

struct KinkedPowers {
    int64_t n, highest, length;
    const int64_t* counts;                           // of each power
    const double *b, *turn, *slope, *weight, *stddev;  // of each element, as the next three
    const double *above, *mean, *density;            // P(zeta > b), E[psi] and phi(b)
    double* const* results;                          // (count, n) of each power
};

struct Binomials {
    double of[POWERS][POWERS] = {}, falling[POWERS][POWERS] = {};  // (p over k), p! / (p - k)!
    Binomials() {
        for (int p = 0; p < POWERS; p++) {
            of[p][0] = falling[p][0] = 1;
            for (int k = 1; k <= p; k++) {
                of[p][k] = of[p - 1][k - 1] + (k < p ? of[p - 1][k] : 0);
                falling[p][k] = falling[p][k - 1] * (p - k + 1);
            }
        }
    }
};

void kinked_element(const KinkedPowers& x, const Binomials& c, int64_t i) {
    const int highest = int(x.highest), length = int(x.length);
    double tails[LENGTH + 1] = {x.above[i], x.mean[i]}, waves[LENGTH + 1];
    double psi[POWERS][LENGTH], centred[POWERS][LENGTH], totals[POWERS][LENGTH];
    const double b = x.b[i], weight = x.weight[i], slope = x.slope[i];
    waves[0] = x.density[i];
    waves[1] = b * waves[0];
    for (int k = 1; k < LENGTH; k++) {
        waves[k + 1] = b * waves[k] - k * waves[k - 1];
        tails[k + 1] = k * tails[k - 1] - b * tails[k];
    }
    for (int p = 0; p <= highest; p++)
        for (int k = 0; k < length; k++)
            psi[p][k] = p == 0 ? k == 0 : k <= p ? c.falling[p][k] * tails[p - k] : c.falling[p][p] * waves[k - p - 1];
    double heavier = 1;
    for (int j = 0; j <= highest; j++, heavier *= weight)
        for (int k = 0; k < length; k++) {
            double sum = 0, factor = 1;
            for (int m = j; m >= 0; m--, factor *= -tails[1]) sum += c.of[j][m] * factor * psi[m][k];
            centred[j][k] = sum;
            totals[j][k] = heavier * sum;
        }
    heavier = 1;
    for (int j = 0; j < highest; j++, heavier *= weight) {
        double rows[LENGTH], raised[LENGTH], steeper = slope;
        for (int k = 0; k < length; k++) rows[k] = centred[j][k];
        for (int p = j + 1; p <= highest; p++, steeper *= slope) {
            for (int k = 0; k < length; k++) {
                raised[k] = (k + 1 < length ? rows[k + 1] : 0) + (k ? k * rows[k - 1] : 0);
                totals[p][k] += c.of[p][j] * steeper * heavier * raised[k];
            }
            for (int k = 0; k < length; k++) rows[k] = raised[k];
        }
    }
    double unit = x.stddev[i];
    for (int p = 1; p <= highest; p++, unit *= x.stddev[i])
        for (int64_t k = 0; k < x.counts[p - 1]; k++)
            x.results[p - 1][k * x.n + i] = unit * (k % 2 ? x.turn[i] : 1) * totals[p][k];
}

}  // namespace
