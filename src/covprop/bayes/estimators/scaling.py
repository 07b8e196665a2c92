"""Standardised columns, and noise in their units."""

from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from covprop.errors import InvalidGaussian
from covprop.gaussian import Gaussian

Floats: TypeAlias = NDArray[np.float64]
ROUNDING = 10 * np.finfo(np.float64).eps
"""A spread below so much of the largest value is that of rounding."""


def array(values: Tensor) -> Floats:
    """Numbers of a tensor, for numpy."""
    return values.detach().cpu().double().numpy()


@final
@dataclass(frozen=True)
class Scaling:
    """The mean and deviation of each column; a column that does not vary has the deviation 0."""

    mean: Floats
    stddev: Floats

    @classmethod
    def of(cls, values: Floats, weight: Floats | None = None) -> "Scaling":
        """Of columns (rows, columns), each row with its weight."""
        mean = np.average(values, axis=0, weights=weight)
        away = values - mean
        largest = np.abs(away).max(axis=0)
        unit = np.where(largest > 0, largest, 1)  # squares of large numbers would overflow
        stddev = unit * np.sqrt(np.average((away / unit) ** 2, axis=0, weights=weight))
        constant = stddev <= ROUNDING * np.abs(values).max(axis=0)
        return cls(np.where(constant, values[0], mean), np.where(constant, 0.0, stddev))

    @classmethod
    def none(cls, columns: int) -> "Scaling":
        """Leaves columns as they are."""
        return cls(np.zeros(columns), np.ones(columns))

    def check(self, columns: int | None) -> None:
        """See that numbers from a file are those of so many columns."""
        wanted = self.mean.shape if columns is None else (columns,)
        if self.mean.ndim != 1 or self.mean.shape != wanted or self.stddev.shape != wanted:
            raise ValueError(f"scales of shape {self.stddev.shape} are not those of the columns")
        if not np.isfinite(self.mean).all() or not (self.stddev >= 0).all():
            raise ValueError("its scales are not finite, or negative")

    @property
    def unit(self) -> Floats:
        """What to divide by: 1 where a column does not vary."""
        return np.where(self.stddev > 0, self.stddev, 1.0)

    def apply(self, values: Floats) -> Floats:
        """Columns of mean 0 and deviation 1."""
        return np.asarray((values - self.mean) / self.unit)

    def spread(self, values: Floats, power: int = 1) -> Floats:
        """Deviations, or variances (power 2), in units of the columns; 0 where those do not vary.

        Also where they are infinite, which 0 times would make no number.
        """
        return np.where(self.stddev > 0, self.unit**power * values, 0.0)


@final
@dataclass(frozen=True)
class InputNoise:
    """The noise of a sensor on standardised features: variances (d,), or a covariance (d, d)."""

    values: Floats

    @classmethod
    def of(cls, noise: ArrayLike, scaling: Scaling) -> "InputNoise":
        """From deviations (one, or one for each feature) or a covariance, in units of X."""
        given: Floats = np.asarray(noise, dtype=np.float64)
        size = len(scaling.mean)
        if given.shape not in ((), (size,), (size, size)) or not np.isfinite(given).all():
            raise ValueError(
                f"input_noise is a standard deviation, one for each of {size} features, or a "
                f"covariance ({size}, {size}), of finite numbers; not of shape {given.shape}"
            )
        if given.ndim < 2:  # noqa: PLR2004
            if (given < 0).any():
                raise ValueError("input_noise has a negative standard deviation")
            return cls(np.broadcast_to(given, (size,)) ** 2 / scaling.unit**2)
        matrix = given / np.outer(scaling.unit, scaling.unit)
        try:
            Gaussian(torch.zeros(size, dtype=torch.float64), torch.as_tensor(matrix))
        except InvalidGaussian as error:
            raise ValueError(f"input_noise is not a covariance: {error}") from error
        return cls(matrix)

    def around(self, x: Any) -> Gaussian:
        """Gaussians around known features (rows, d)."""
        values = torch.as_tensor(self.values).to(x).expand(len(x), *self.values.shape)
        if self.values.ndim == 1:
            return Gaussian.diagonal(x, values, 1)
        return Gaussian(x, values, validate_args=False)
