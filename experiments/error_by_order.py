"""Section 4.1 of the paper: the error of ReLU's covariance by order, against Wu et al."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import covprop as cp
from experiments.record import default_path, write

CORRELATIONS = (0.5, 0.9, 0.99, 0.999)
ORDERS = range(1, 11)
LARGEST_MEAN = 5.0
STEPS = 201
PUBLISHED = {"order 1": 2.034e-2, "order 4": 3.740e-4, "wu2019": 1.160e-1}
"""Maximum errors at rho = 0.5 as the paper prints them; docs/mathematics.md on the last two."""


def grid(correlation: float, steps: int) -> cp.Gaussian:
    """Pairs of unit variance whose means cover [-5, 5]^2, as one batch."""
    axis = torch.linspace(-LARGEST_MEAN, LARGEST_MEAN, steps, dtype=torch.float64)
    means = torch.cartesian_prod(axis, axis)
    covariance = torch.eye(2, dtype=torch.float64) * (1 - correlation) + correlation
    return cp.Gaussian(means, covariance.expand(len(means), 2, 2), validate_args=False)


def covariance(x: cp.Gaussian, method: Any) -> Tensor:
    """The off-diagonal entry after a ReLU."""
    return cp.propagate(torch.relu, x, method).covariance_matrix[:, 0, 1]


def run(out: Path | None = None, smoke: bool = False) -> dict[str, Any]:
    """Maximum and mean absolute error of every order and of Wu et al., for every correlation."""
    steps = 11 if smoke else STEPS
    results: dict[str, Any] = {}
    for correlation in CORRELATIONS:
        x = grid(correlation, steps)
        exact = covariance(x, cp.Exact())
        rivals = {f"order {k}": covariance(x, cp.Series(order=k)) for k in ORDERS}
        rivals["wu2019"] = covariance(x, cp.Wu2019())
        results[str(correlation)] = {
            name: {
                "max": float((value - exact).abs().max()),
                "mean": float((value - exact).abs().mean()),
            }
            for name, value in rivals.items()
        }
    settings = {"means": [-LARGEST_MEAN, LARGEST_MEAN], "steps": steps, "published": PUBLISHED}
    write(out or default_path("error_by_order", smoke), settings, results)
    return results


def show(results: dict[str, Any]) -> None:
    """Print the maximum errors as a table."""
    print("maximum absolute error of Cov(relu, relu), sigma = 1, means in [-5, 5]")
    print(f"{'rho':>8}" + "".join(f"{rho:>12}" for rho in results))
    for name in next(iter(results.values())):
        row = "".join(f"{results[rho][name]['max']:12.3e}" for rho in results)
        print(f"{name:>8}{row}")
