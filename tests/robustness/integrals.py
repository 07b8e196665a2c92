"""Class probabilities by quadrature, and the networks and Gaussians that tests use.

Logits y_c = mu_c + s_c e_c + l_c z with independent standard normal e and z: given z they are
independent, and p_c = E_z int density of y_c times prod_j P(y_j < y_c) is a double integral for any
number of classes. Nothing here imports covprop but what is under test.
"""

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor, nn

import covprop as cp
from tests.oracles import panels

REACH = 9.0
"""Standard deviations on either side: 1e-18 of the mass is left out."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(inputs: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers[:-1]).double().eval().requires_grad_(requires_grad=False)


def random_gaussian(*batch: int, size: int, rank: int | None = None, seed: int = 0) -> cp.Gaussian:
    shape = (*batch, size, rank or size)
    factor = torch.randn(shape, dtype=torch.float64, generator=generator(seed))
    mean = torch.randn((*batch, size), dtype=torch.float64, generator=generator(seed + 1))
    return cp.Gaussian(mean, factor @ factor.mT)


def normal_rule(cells: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and probability weights of the standard normal distribution."""
    nodes, weights = panels(np.linspace(-REACH, REACH, cells + 1), 8)
    return nodes, weights * np.exp(-(nodes**2) / 2) / np.sqrt(2 * np.pi)


def one_factor(mean: np.ndarray, stddev: np.ndarray, loading: np.ndarray) -> np.ndarray:
    """p_c of y = mean + stddev * e + loading * z; every stddev is positive."""
    z, outer = normal_rule()
    e, inner = normal_rule()
    centre = mean + z[:, None] * loading  # (z, classes)
    found = []
    for own in range(len(mean)):
        y = centre[:, own, None] + stddev[own] * e  # (z, e)
        wins = np.ones_like(y)
        for other in range(len(mean)):
            if other != own:
                wins = wins * ndtr((y - centre[:, other, None]) / stddev[other])
        found.append(float(outer @ (wins @ inner)))
    return np.array(found)


def two_factors(mean: np.ndarray, loading: np.ndarray) -> np.ndarray:
    """p_c of y = mean + loading @ (z, u): given z, an interval of u for each class."""
    z, outer = normal_rule(4000)  # ends of intervals have kinks in z
    found = []
    for own in range(len(mean)):
        at = (mean[own] - np.delete(mean, own))[:, None]
        slopes = loading[own] - np.delete(loading, own, axis=0)
        at = at + slopes[:, :1] * z
        with np.errstate(divide="ignore"):
            bound = -at / slopes[:, 1:]
        low = np.where(slopes[:, 1:] > 0, bound, -np.inf).max(0)
        high = np.where(slopes[:, 1:] < 0, bound, np.inf).min(0)
        found.append(float(outer @ np.maximum(ndtr(high) - ndtr(low), 0)))
    return np.array(found)


def factor_gaussian(mean: np.ndarray, stddev: np.ndarray, loading: np.ndarray) -> cp.Gaussian:
    """The same logits as a Gaussian; a loading has one column or more."""
    columns = torch.from_numpy(loading.reshape(len(mean), -1))
    matrix = torch.diag(torch.from_numpy(stddev**2)) + columns @ columns.mT
    return cp.Gaussian(torch.from_numpy(mean), matrix)


def within(found: Tensor, expected: Tensor, stderr: Tensor, errors: float = 5.0) -> bool:
    """Whether all are within so many standard errors."""
    return bool(((found - expected).abs() <= errors * stderr).all())


def normal_cdf(z: Tensor) -> Tensor:
    """Phi, by scipy."""
    return torch.from_numpy(np.asarray(ndtr(z.numpy())))
