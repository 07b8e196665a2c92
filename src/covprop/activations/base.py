"""What covprop must know of a scalar function to carry a Gaussian through it."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

Elements: TypeAlias = tuple[Tensor, ...]
"""Numbers of each element that `pair` needs: tensors of shape (*any, *batch, n)."""


@dataclass(eq=False)
class Activated:
    """An activation of a Gaussian vector with these moments, (*batch, n) in float64.

    What has been computed of it is kept, as it may meet many others.
    """

    activation: "Activation"
    mean: Tensor
    variance: Tensor
    _coefficients: Tensor | None = field(default=None, init=False)

    @cached_property
    def elements(self) -> Elements:
        """The numbers of each element that `pair` needs."""
        return self.activation.elements(self.mean, self.variance)

    def coefficients(self, order: int) -> Tensor:
        """Hermite coefficients over the standard deviation, up to this order."""
        if self._coefficients is None or len(self._coefficients) < order:
            self._coefficients = self.activation.coefficients(self.mean, self.variance, order)
        return self._coefficients[:order]


class Activation(ABC):
    """The moments of g(y) for y ~ N(mean, variance), element by element.

    Means and variances are float64 tensors of shape (*batch, n): this part is O(n), and its
    accuracy bounds everything after it. `pair` is O(n^2) and works in the dtype of the covariance.
    """

    @abstractmethod
    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[g(y)]."""

    @abstractmethod
    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Var[g(y)], accurate relative to itself."""

    @abstractmethod
    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """Hermite coefficients over the standard deviation, a_k / sigma for k = 1 ... order.

        a_k = E[g(mu + sigma xi) He_k(xi)] / sqrt(k!). The first is E[g'(y)]; the division keeps the
        limit at sigma = 0. Shape (order, *batch, n).
        """

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What `pair` depends on beside the elements: activations of equal keys share it."""

    @abstractmethod
    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """Prepare the numbers of each element for `pair`."""

    @abstractmethod
    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] from the elements of i, those of j, and Cov[y_i, y_j].

        left has shapes (..., rows, 1), right (..., 1, columns), covariance (*batch, rows, columns).
        """
