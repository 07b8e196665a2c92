"""ReLU covariances by conditioning: slow, accurate, and with no formula of the library in it."""

import math

import numpy as np
import torch
from torch import Tensor

LARGEST = 9.5
"""Standard deviations to integrate over: the density beyond is below 1e-19."""
ROWS = 2_000


def random_pairs(covariance: Tensor, random: int, extreme: int) -> Tensor:
    """Pairs (2, count) of distinct units: at random, and those that correlate most."""
    size = len(covariance)
    first = torch.randint(size, (random,))
    second = (first + torch.randint(1, size, (random,))) % size
    inverse = covariance.diagonal().rsqrt()
    correlation = (covariance * inverse * inverse[:, None]).abs_().triu_(1)
    _, index = correlation.flatten().topk(extreme)
    return torch.cat((torch.stack((first, second)), torch.stack((index // size, index % size))), 1)


def relu_covariance(mean: Tensor, covariance: Tensor, pairs: Tensor, panels: int = 60) -> Tensor:
    """Cov(relu(x_i), relu(x_j)) / (sigma_i sigma_j) of the pairs, in float64.

    E[relu(a + z) relu(b + w)] is the integral over z of relu(a + z) E[relu(b + w) | z] phi(z):
    Gauss-Legendre of 20 nodes on each panel between the kink at z = -a and LARGEST.
    """
    stddev = covariance.diagonal().double().sqrt()
    a, b = (mean.double() / stddev)[pairs]
    i, j = pairs
    rho = (covariance[i, j].double() / (stddev[i] * stddev[j])).clamp(-1, 1)
    parts = zip(a.split(ROWS), b.split(ROWS), rho.split(ROWS), strict=True)
    return torch.cat([_covariance(*(t[:, None] for t in part), panels) for part in parts])


def _covariance(a: Tensor, b: Tensor, rho: Tensor, panels: int) -> Tensor:
    nodes, weights = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(20))
    edges = torch.arange(panels, dtype=torch.float64)[:, None]
    unit = ((edges + (nodes + 1) / 2) / panels).flatten()
    start = (-a).clamp(-LARGEST, LARGEST)
    z = start + (LARGEST - start) * unit
    weight = (LARGEST - start) * (weights / (2 * panels)).repeat(panels) * _density(z)
    spread = (1 - rho.square()).sqrt().clamp_min(1e-100)
    # Cov(f, g) = E[f (g - E g)]: without this the two means' product would cancel.
    conditional = _mean(b + rho * z, spread) - _mean(b, torch.ones_like(b))
    return (weight * (a + z) * conditional).sum(-1)


def _mean(mean: Tensor, stddev: Tensor) -> Tensor:
    """Of relu."""
    t = mean / stddev
    return mean * torch.special.ndtr(t) + stddev * _density(t)


def _density(t: Tensor) -> Tensor:
    return torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
