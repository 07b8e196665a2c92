"""Powers of functions with one kink, compiled and in torch, against quadrature in 30 digits."""

import mpmath as mp
import numpy as np
import pytest
import torch

from covprop.kernels import compiled
from covprop.kernels.kinked import kinked_powers
from tests.kernels.conftest import RUNNABLE

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no compiler was found")


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("instructions", ["torch", *RUNNABLE], indirect=True)
@pytest.mark.parametrize("slopes", [(0.0, 1.0), (0.2, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize("a", [0.0, 0.4, -0.4, 3.0, -9.0])
def test_powers_of_a_function_with_one_kink_keep_their_accuracy(a, slopes):
    """E[f^p He_k] relative to the norms of f^p and He_k, also where f hardly varies."""
    counts, stddev = (10, 10, 4), 0.5
    distance = torch.tensor([a * stddev], dtype=torch.float64)
    scale = torch.tensor([stddev], dtype=torch.float64)
    found = kinked_powers(distance, scale, *slopes, counts)
    with mp.workdps(30):
        low, high = map(mp.mpf, slopes)
        nodes = [(x, w * mp.npdf(x)) for x, w in panels(-a)]
        values = [stddev * (a + x) * (high if a + x > 0 else low) for x, _ in nodes]
        centre = mp.fsum(w * g for (_, w), g in zip(nodes, values, strict=True))
        for p, rows in enumerate(found, start=1):
            powers = [(g - centre) ** p for g in values]
            size = mp.sqrt(mp.fsum(w * f**2 for (_, w), f in zip(nodes, powers, strict=True)))
            for k in (0, 1, 2, 3, len(rows) - 1):
                terms = zip(nodes, powers, strict=True)
                expected = mp.fsum(w * f * hermite(k, x) for (x, w), f in terms)
                error = abs(float(rows[k, 0]) - expected) / (size * mp.sqrt(mp.factorial(k)))
                # exp(-a^2 / 2) has a^2 / 2 roundings, the third power of the tail a^4 / 6 more.
                assert error <= (32 + a**2 + a**4 / 6) * 2.0**-52, (p, k)


def panels(kink):
    """Nodes and weights of Gauss-Legendre quadrature on panels of unit length about a kink."""
    points, weights = np.polynomial.legendre.leggauss(20)
    for start in range(-24, 24):
        for point, weight in zip(points, weights, strict=True):
            x = mp.mpf(kink) + start + (mp.mpf(point) + 1) / 2
            if abs(x) < 13:
                yield x, mp.mpf(weight) / 2


def hermite(k, x):
    """He_k, by its recurrence."""
    low, high = mp.mpf(1), x
    for n in range(1, k):
        low, high = high, x * high - n * low
    return high if k else low
