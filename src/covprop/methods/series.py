"""The paper's Theorem 1: a Hermite series in the correlation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.base import Elements, MatrixFunction, noting
from covprop.activations.correlated import (
    series_cross,
    series_elements,
    series_matrix,
    series_pair,
)
from covprop.covariance import Covariance, Dense
from covprop.covariance.base import Pairs
from covprop.errors import ToleranceNotReached
from covprop.flow.lineage import Replacements
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.kernels.rounding import REMAINDER
from covprop.methods.layerwise import LayerwiseMethod

DEFAULT_ORDER = 4
LARGEST_ORDER = 512
"""Where `Series(tolerance=...)` gives up: pairs with |rho| = 1 may need far more."""


SERIES_PAIRS = Pairs(series_pair, series_matrix)


@final
@dataclass(frozen=True)
class Series(LayerwiseMethod):
    """The Hermite series of Wright, Nakahira & Moura (2024), truncated at an order.

    Args:
        order: The number of terms, by default 4.
        tolerance: In place of an order: each layer takes the smallest order whose error bound is at
            most this, relative to the product of the two standard deviations.
        exact_variance: Use the exact variance on the diagonal; the paper uses the truncated one.
        activations: As for `GaussianLayers`.
        independent_maxima: As for `GaussianLayers`.

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        cp.propagate(torch.relu, x, cp.Series(order=4))
    """

    order: int | None = None
    tolerance: float | None = None
    exact_variance: bool = True
    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = False

    def __post_init__(self) -> None:
        """Check the order or the tolerance; take the default order if there is neither."""
        if self.order is not None and self.tolerance is not None:
            raise ValueError("give Series an order or a tolerance, not both")
        if self.order is None and self.tolerance is None:
            object.__setattr__(self, "order", DEFAULT_ORDER)
        if self.order is not None and (type(self.order) is not int or self.order < 1):
            raise ValueError(f"the order of a series is a whole number from 1, not {self.order}")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"a tolerance is a positive number, not {self.tolerance}")

    @property
    def first_order(self) -> bool:
        """Whether one term is all."""
        return self.order == 1

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Cov = c_ij sum_k rho^(k-1) (a_k / sigma)_i (a_k / sigma)_j."""
        whole = None
        if self.order is not None:
            terms = self.order, not self.exact_variance
            whole = covariance.of_matrix(
                lambda matrix: activation.of_matrix(
                    mean, matrix, self._by_torch(activation), *terms
                )
            )
        return self._activate(activation, mean, covariance) if whole is None else whole

    def _by_torch(self, activation: Activation) -> MatrixFunction:
        def moments(mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
            result, made = self._activate(activation, mean, Dense(matrix))
            return result, made.matrix()

        return moments

    def _activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """The same, step by step."""
        variance = covariance.diagonal().double()
        point = mean.double()
        if covariance.independent and self.exact_variance:
            result, output = activation.marginals(point, variance)
            return result.to(mean.dtype), covariance.pairwise(activation.pair, (), output)
        order = self.order or sufficient_order(activation, point, covariance, self.tolerance or 0)
        result, output, coefficients = activation.moments(point, variance, order)
        truncated = _squares(coefficients, variance).sum(0)
        # Never below the truncated sum, or the matrix would not be positive semi-definite; above
        # it for every true activation.
        output = torch.maximum(output, truncated) if self.exact_variance else truncated
        elements = series_elements(coefficients, variance, covariance.dtype)
        return result.to(mean.dtype), covariance.pairwise(SERIES_PAIRS, elements, output)

    def observed(self, activation: Activation, note: Callable[[int], None]) -> Activation:
        """As many coefficients as there are terms."""
        return noting(activation, note, moments=lambda args, _: args[2])

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """The theorem needs neither the same function nor the same vector."""
        return series_cross(left, right, covariance, self.order or LARGEST_ORDER // 8)


def _squares(coefficients: Tensor, variance: Tensor) -> Tensor:
    """a_k^2; those of a_k / sigma may overflow at a jump."""
    return coefficients * (variance.clamp(min=0) * coefficients)


def remainders(activation: Activation, mean: Tensor, variance: Tensor, order: int) -> Tensor:
    """(Var - sum_{k <= K} a_k^2) / Var for K = 1 ... order, as (order, *batch, n).

    The difference of nearly equal numbers is uncertain by a few rounding errors, which are added.
    """
    output = activation.variance(mean, variance)
    positive = output > 0
    explained = _squares(activation.coefficients(mean, variance, order), variance)
    share = explained.cumsum(0) / torch.where(positive, output, 1)
    rest = (1 - share).clamp(min=0) + REMAINDER * torch.finfo(share.dtype).eps
    return torch.where(positive, rest, 0)


@torch.no_grad()
def sufficient_order(
    activation: Activation, mean: Tensor, covariance: Covariance, tolerance: float
) -> int:
    """The smallest order whose bound |rho|^(K+1) sqrt(R_i R_j) meets the tolerance everywhere."""
    variance = covariance.diagonal().double()
    inverse = inverse_deviation(variance)

    def bound(rest: Tensor, order: int) -> float:
        def pair(left: Elements, right: Elements, block: Tensor) -> Tensor:
            size = correlation(block, left[0], right[0]).abs()
            return size ** (order + 1) * (left[1] * right[1])

        return covariance.largest(pair, (inverse, rest[order - 1].sqrt()))

    highest = 2 * DEFAULT_ORDER
    rest = remainders(activation, mean, variance, highest)
    while (left_over := bound(rest, highest)) > tolerance:
        if highest >= LARGEST_ORDER:
            raise ToleranceNotReached(
                f"after {highest} terms the error bound is {left_over:.1e}, above the tolerance "
                f"{tolerance:.1e}, because some units are almost perfectly correlated; use "
                "cp.GaussianLayers() or a larger tolerance"
            )
        highest *= 2
        rest = remainders(activation, mean, variance, highest)
    low, high = 1, highest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(rest, middle) <= tolerance else (middle + 1, high)
    return low
