"""The methods that tables 1 and 2 compare, and what a result keeps of each."""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import covprop as cp
from experiments.randomness import seed_of

SAMPLES, SMOKE_SAMPLES = 75_000, 2_000
SAMPLED = "Monte Carlo"
CENTRED, PIECEWISE, PUBLISHED, SERIES, EXACT = (
    "PL-DNN (2018)",
    "PL-DNN, any mean (2020)",
    "series 4, as published",
    "series 4, exact variances",
    "exact",
)
SPLIT, CUMULANTS = "exact, split in 3", "third cumulants"

METHODS: dict[str, Callable[[nn.Sequential, cp.Gaussian], cp.Gaussian]] = {
    CENTRED: partial(cp.propagate, method=cp.PiecewiseLinear(zero_mean=True)),
    PIECEWISE: partial(cp.propagate, method=cp.PiecewiseLinear()),
    PUBLISHED: partial(cp.propagate, method=cp.Series(order=4, exact_variance=False)),
    SERIES: partial(cp.propagate, method=cp.Series(order=4)),
    EXACT: partial(cp.propagate, method=cp.Exact()),
}
BEYOND: dict[str, dict[str, Callable[[nn.Sequential, cp.Gaussian], cp.Gaussian]]] = {
    "beyond": {SPLIT: partial(cp.propagate, method=cp.Split(3))},
    "cumulants": {CUMULANTS: partial(cp.propagate, method=cp.Cumulants())},
}
"""What the paper does not have, by the last part of the keys of its results."""
DIGITS = 7


def measured(
    model: nn.Sequential, x: cp.Gaussian, samples: int, *seed: object, covariance: bool = False
) -> dict[str, Any]:
    """Moments of the output by every method and by sampling, with standard errors and seconds."""
    generator = torch.Generator().manual_seed(seed_of("samples", *seed))
    sampling = partial(cp.propagate, method=cp.MonteCarlo(samples, generator))
    sampled, seconds = _timed(sampling, model, x)
    result = {SAMPLED: {
        **_moments(sampled, covariance), "seconds": seconds,
        "mean stderr": _rounded(sampled.mean_stderr),
        "variance stderr": _rounded(_diagonal(sampled.covariance_stderr)),
    }}  # fmt: skip
    return result | _by(METHODS, model, x, covariance)


def beyond(part: str, model: nn.Sequential, x: cp.Gaussian) -> dict[str, Any]:
    """The same by methods that go beyond the paper, without sampling again."""
    return _by(BEYOND[part], model, x)


def _by(
    methods: dict[str, Any], model: nn.Sequential, x: cp.Gaussian, covariance: bool = False
) -> dict[str, Any]:
    result = {}
    for name, method in methods.items():
        y, seconds = _timed(method, model, x)
        notes = {"notes": len(y.notes)} if y.notes else {}
        result[name] = {**_moments(y, covariance), "seconds": seconds, **notes}
    return result


def _timed(method: Callable[..., Any], model: nn.Module, x: cp.Gaussian) -> tuple[Any, float]:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.ApproximationWarning)  # results have notes
        y = method(model, x)
    return y, round(time.perf_counter() - started, 3)


def _moments(y: cp.Gaussian, covariance: bool) -> dict[str, Any]:
    moments = {"mean": _rounded(y.mean), "variance": _rounded(y.variance)}
    if covariance:
        rows, columns = torch.tril_indices(y.mean.numel(), y.mean.numel())
        moments["covariance"] = _rounded(y.covariance_matrix[rows, columns])
    return moments


def _diagonal(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _rounded(values: torch.Tensor) -> list[float]:
    """As many digits as float32 has."""
    return [float(f"{value:.{DIGITS}g}") for value in values.flatten().tolist()]
