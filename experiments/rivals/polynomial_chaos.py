"""Polynomial chaos (Xiu & Karniadakis 2002), its coefficients by least squares.

With x = m + R z, z standard normal in d directions, the network is expanded in products of Hermite
polynomials, normalised so that E[h_j h_k] = 1 for j = k and else 0:

    f(x) ~ sum_k c_k H_k(z),  H_k(z) = prod_i h_{k_i}(z_i),  k_1 + ... + k_d <= p
    mean  c_0        covariance  sum over k != 0 of c_k c_k^T

The number of terms is (d + p choose p). Coefficients minimise the squares of what is left at
`OVERSAMPLED` quasi-random points for each term.
"""

import math
from functools import cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

import covprop as cp
from experiments.rivals.rival import Propagate, Refused

MOST_TERMS = 2_000
"""Least squares of more take longer than samples that are as good."""
OVERSAMPLED = 3
HALF_CELL = 2.0**-31
"""Half the distance of neighbours in torch's sequence: keeps points off 0 and 1."""


def of_degree(degree: int) -> Propagate:
    """The method with polynomials up to a total degree."""

    def propagate(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
        size = x.event_shape.numel()
        values, vectors = torch.linalg.eigh(x.covariance_matrix.reshape(size, size))
        varying = values > torch.finfo(values.dtype).eps * size * values.max()
        root = vectors[:, varying] * values[varying].sqrt()
        terms = math.comb(root.shape[1] + degree, degree)
        if terms > MOST_TERMS:
            raise Refused(f"{root.shape[1]} directions of noise have {terms:,} polynomials")
        points = normal_points(OVERSAMPLED * terms, root.shape[1]).to(root.dtype)
        design = hermite_products(points, degree)
        inputs = x.mean.reshape(1, *x.event_shape) + (points @ root.T).reshape(-1, *x.event_shape)
        outputs = model(inputs)
        solved = torch.linalg.lstsq(design, outputs.flatten(1)).solution
        mean, rest = solved[0].reshape(1, *outputs.shape[1:]), solved[1:]
        covariance = rest.T @ rest
        if not len(x.batch_shape):
            return cp.Gaussian(mean[0], covariance, validate_args=False)
        return cp.Gaussian(mean, covariance[None], validate_args=False)

    return propagate


def normal_points(count: int, directions: int) -> Tensor:
    """Scrambled Sobol points of a standard normal distribution, (count, directions)."""
    engine = SobolEngine(directions, scramble=True, seed=0)
    return torch.special.ndtri(engine.draw(count, dtype=torch.float64) + HALF_CELL)


def hermite_products(points: Tensor, degree: int) -> Tensor:
    """All normalised products up to a total degree, the constant first, (points, terms).

    h_{k+1}(z) = (z h_k(z) - sqrt(k) h_{k-1}(z)) / sqrt(k + 1).
    """
    table = [torch.ones_like(points), points]
    for k in range(1, degree):
        table.append((points * table[k] - math.sqrt(k) * table[k - 1]) / math.sqrt(k + 1))
    columns = []
    for powers in exponents(points.shape[1], degree):
        column = torch.ones_like(points[:, 0])
        for place, power in powers:
            column = column * table[power][:, place]
        columns.append(column)
    return torch.stack(columns, 1)


@cache
def exponents(directions: int, degree: int) -> list[tuple[tuple[int, int], ...]]:
    """Directions and powers of each product that are not zero."""
    chosen = [
        places
        for total in range(degree + 1)
        for places in combinations_with_replacement(range(directions), total)
    ]
    return [
        tuple((place, places.count(place)) for place in dict.fromkeys(places)) for places in chosen
    ]
