"""Section 4.1's inputs: pairs of unit variance whose means cover [-5, 5]^2."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import covprop as cp

LARGEST_MEAN = 5.0
RHO = 0.5
DIGITS = 3


def axis(steps: int) -> np.ndarray:
    """The means of one variable."""
    return np.linspace(-LARGEST_MEAN, LARGEST_MEAN, steps)


def means(steps: int) -> np.ndarray:
    """Pairs of means, one of each that differ by their order alone, (pairs, 2)."""
    rows, columns = np.tril_indices(steps)
    return np.stack([axis(steps)[rows], axis(steps)[columns]], axis=1)


def covariance(
    function: Callable[[Tensor], Tensor], steps: int, rho: float, method: Any
) -> np.ndarray:
    """What a method gives for Cov(g(y1), g(y2)) over the grid, (steps, steps)."""
    pairs = torch.from_numpy(means(steps))
    matrix = torch.eye(2, dtype=torch.float64) * (1 - rho) + rho
    x = cp.Gaussian(pairs, matrix.expand(len(pairs), 2, 2), validate_args=False)
    return square(cp.propagate(function, x, method).covariance_matrix[:, 0, 1].numpy(), steps)


def square(triangle: np.ndarray, steps: int) -> np.ndarray:
    """The values of `means` put back on the grid, (steps, steps)."""
    rows, columns = np.tril_indices(steps)
    result = np.empty((steps, steps))
    result[rows, columns] = result[columns, rows] = triangle
    return result


def packed(symmetric: np.ndarray) -> list[float]:
    """For a record: one half of the grid, three digits."""
    return [
        float(f"{value:.{DIGITS - 1}e}") for value in symmetric[np.tril_indices(len(symmetric))]
    ]


def summary(errors: np.ndarray) -> dict[str, float]:
    """The largest and the mean absolute error."""
    return {"max": float(np.abs(errors).max()), "mean": float(np.abs(errors).mean())}
