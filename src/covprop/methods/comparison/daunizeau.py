"""The approximate sigmoid of the paper's appendix."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements
from covprop.activations.quadrature import Quadrature
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import standard_deviation

FITTED = 0.368
"""Daunizeau's alpha (2017); pi / 8 comes from matching tanh to erf."""


@final
@dataclass(frozen=True)
class DaunizeauSigmoid(Activation):
    """E[sigmoid(y)] ~ sigmoid(mu / beta), beta = sqrt(1 + alpha sigma^2), and its derivatives.

    Its series is asymptotic: use it at the paper's low orders, with `cp.Series`. The variance on
    the diagonal is the accurate one, or the truncated sum where the approximation exceeds it.

    Args:
        alpha: The constant of beta.

    Example:
        series = cp.Series(order=2, activations={torch.sigmoid: cp.DaunizeauSigmoid()})
        cp.propagate(torch.sigmoid, x, series)
    """

    alpha: float = FITTED

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """sigmoid(mu / beta)."""
        return torch.sigmoid(mean / self._beta(variance))

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The variance of the true sigmoid, by quadrature."""
        return Quadrature(torch.sigmoid).variance(mean, variance)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (sigma / beta)^k sigmoid^(k)(mu / beta) / sqrt(k!)."""
        beta = self._beta(variance)
        value = torch.sigmoid(mean / beta)
        ratio, factor = standard_deviation(variance) / beta, 1 / beta
        polynomial, rows = [0.0, 1.0, -1.0], []  # s' = s - s^2, as coefficients of powers of s
        for k in range(1, order + 1):
            factor = factor / math.sqrt(k)
            derivative = torch.zeros_like(value)
            for coefficient in reversed(polynomial):
                derivative = derivative * value + coefficient
            rows.append(factor * derivative)
            factor = factor * ratio
            slopes = [p * c for p, c in enumerate(polynomial)]
            polynomial = [c - d for c, d in zip([*slopes, 0.0], [0.0, *slopes], strict=True)]
        return torch.stack(rows)

    @property
    def key(self) -> Hashable:
        """The constant."""
        return self.alpha

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """There is no exact covariance of an approximation."""
        del mean, variance
        raise UnsupportedOperation(
            "Daunizeau's sigmoid has no exact covariance; use cp.Series(order=...) with it, or the "
            "accurate sigmoid"
        )

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """There is no exact covariance of an approximation."""
        del left, right, covariance
        raise UnsupportedOperation("Daunizeau's sigmoid has no exact covariance; use cp.Series")

    def _beta(self, variance: Tensor) -> Tensor:
        return (1 + self.alpha * variance.clamp(min=0)).sqrt()
