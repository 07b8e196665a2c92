"""What covprop must know of a scalar function to carry a Gaussian through it."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from covprop.activations.grids import Scalar

Elements: TypeAlias = tuple[Tensor, ...]
"""Numbers of each element that `pair` needs: tensors of shape (*any, *batch, n)."""


class Prepared(NamedTuple):
    """Moments of an activated vector (*batch, n), and what the covariances of its pairs need."""

    mean: Tensor
    variance: Tensor
    elements: Elements


@dataclass(eq=False)
class Activated:
    """An activation of a Gaussian vector with this mean and these variances, (*batch, n).

    What has been computed of it is kept, as it may meet many others.
    """

    activation: "Activation"
    loc: Tensor
    spread: Tensor
    _coefficients: Tensor | None = field(default=None, init=False)
    _elements: Elements | None = field(default=None, init=False)

    @cached_property
    def mean(self) -> Tensor:
        """The mean in float64."""
        return self.loc.double()

    @cached_property
    def variance(self) -> Tensor:
        """The variances in float64."""
        return self.spread.double()

    @cached_property
    def output(self) -> Tensor:
        """The variances of the activated vector."""
        return self.activation.variance(self.mean, self.variance)

    def elements(self, dtype: torch.dtype) -> Elements:
        """The numbers of each element that `pair` needs, for pairs of any correlation."""
        if self._elements is None or self._elements[0].dtype != dtype:
            order = self.activation.order(1.0, dtype)
            prepared = self.activation.prepare(self.mean, self.variance, order, dtype)
            self._elements = prepared.elements
        return self._elements

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

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and coefficients together, for functions that find them together."""
        coefficients = self.coefficients(mean, variance, order)
        return self.mean(mean, variance), self.variance(mean, variance), coefficients

    @property
    def uniform(self) -> bool:
        """Whether it is the same function of every element, so that some may be treated apart."""
        return False

    @property
    def degree(self) -> int | None:
        """The order at which its Hermite series ends, if it does."""
        return None

    @property
    def rises(self) -> bool:
        """Whether it is one function that never falls, which commutes with maxima."""
        return False

    def marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, where nothing else is wanted."""
        return self.mean(mean, variance), self.variance(mean, variance)

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What `pair` depends on beside the elements: activations of equal keys share it."""

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """Functions that are the same for all elements, and the factors that make it their sum."""

        def function(y: Tensor) -> Tensor:
            return self.mean(y, torch.zeros_like(y))

        del variance
        return [(torch.ones_like(mean), Scalar(function, conditional_mean=self.mean))]

    few: ClassVar[int] = sys.maxsize
    """The number of pairs up to which `pair` wants no coefficients."""

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """How many coefficients `pair` wants for more pairs, of at most this |rho|."""
        del largest, dtype
        return 0

    @abstractmethod
    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """The numbers of each element that its covariances need."""

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """Moments, and what `pair` needs of each element in the dtype of the covariance."""
        del order
        elements = tuple(element.to(dtype) for element in self.elements(mean, variance))
        return Prepared(self.mean(mean, variance), self.variance(mean, variance), elements)

    @abstractmethod
    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] from what is prepared of i and of j, and Cov[y_i, y_j].

        left has shapes (..., rows, 1), right (..., 1, columns), covariance (*batch, rows, columns).
        """
