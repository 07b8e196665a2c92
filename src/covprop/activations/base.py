"""Scalar functions of Gaussians: what is known of one, the series for its pairs, declarations.

The covariance of a pair is the Hermite series where a short one is exact, a direct formula
elsewhere. The error after K terms is at most |rho|^(K+1) r_i r_j, relative to the standard
deviations, with r the root of the share of an element's variance that is left after K terms
(Cauchy-Schwarz).
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.moments import Scalar
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.kernels.polynomials import flushed, in_units, power_series, series_units
from covprop.kernels.rounding import REMAINDER, rounding

Factory: TypeAlias = Callable[..., "Activation"]
"""Options of torch functions -> their activation."""
Elements: TypeAlias = tuple[Tensor, ...]
"""Numbers of each element that `pair` needs: tensors of shape (*any, *batch, n)."""

CLOSED = "exact: closed form"
INTEGRAL = "exact: closed form and one-dimensional integral"
QUADRATURE = "accurate to 1e-8: quadrature and as many terms as the bound needs"
"""How the table of operations describes what is done with an activation."""
LADDER = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
"""Orders that the series may have."""
SAMPLED_PAIRS = 2048
"""Pairs of a block from which its order is chosen."""
SPLIT_COST = 8
"""Cost of computing some pairs of a block separately, in terms of the series for all of them."""
LAST_COEFFICIENTS = 8
"""How many of the last coefficients bound those beyond."""


class Prepared(NamedTuple):
    """Moments of an activated vector (*batch, n), and what the covariances of its pairs need."""

    mean: Tensor
    variance: Tensor
    elements: Elements


class Activation(ABC):
    """The moments of g(y) for y ~ N(mean, variance), element by element.

    Means and variances are float64 tensors of shape (*batch, n): this part is O(n), and its
    accuracy bounds everything after it. `pair` is O(n^2) and works in the dtype of the covariance.

    Example:
        tanh = cp.activations.Quadrature(torch.tanh)  # any continuous function is an Activation
        cp.propagate(model, x, method=cp.GaussianLayers(activations={torch.sigmoid: tanh}))
    """

    direct_pairs: ClassVar[int] = sys.maxsize
    """The number of pairs up to which `pair` uses no coefficients."""

    @abstractmethod
    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[g(y)]."""

    def at(self, y: Tensor) -> Tensor:
        """g(y), for a y that does not vary."""
        return self.mean(y, torch.zeros_like(y))

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
        """Mean, variance and coefficients together, for functions that compute them together."""
        coefficients = self.coefficients(mean, variance, order)
        return self.mean(mean, variance), self.variance(mean, variance), coefficients

    def marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance only."""
        return self.mean(mean, variance), self.variance(mean, variance)

    @property
    def uniform(self) -> bool:
        """Whether it is the same function of every element, which may be computed separately."""
        return False

    @property
    def degree(self) -> int | None:
        """The order at which its Hermite series ends, if it does."""
        return None

    @property
    def nondecreasing(self) -> bool:
        """Whether it is one nondecreasing function, which commutes with maxima."""
        return False

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

    def powers(self, mean: Tensor, variance: Tensor, counts: Sequence[int]) -> list[Tensor] | None:
        """E[f^p He_k], p = 1, 2, 3, of the centred function, None to integrate its `scalars`."""
        del mean, variance, counts
        return None

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """How many coefficients `pair` uses for more than `direct_pairs`, of at most this |rho|."""
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


@dataclass(eq=False)
class Activated:
    """An activation of a Gaussian vector, which keeps what has been computed of it.

    Args:
        activation: The scalar function.
        loc: Mean of the vector, (*batch, n).
        spread: Its variances, (*batch, n).

    Example:
        activated = cp.activations.Activated(cp.activations.Quadrature(torch.tanh), mean, variance)
        activated.coefficients(4)
    """

    activation: Activation
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


class Correlated(Activation, ABC):
    """An activation with a direct formula for pairs, which costs more than a short series."""

    max_order: ClassVar[int] = 48
    """The order beyond which the direct formula is cheaper."""
    direct_pairs: ClassVar[int] = 2**14  # below, coefficients cost more than they save
    direct_cost: ClassVar[float] = 1000.0
    """The cost of the direct formula, in terms of the series."""
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 3e-8, torch.float64: 1e-15}
    """Bound of the error of the series, relative to the standard deviations."""

    @abstractmethod
    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] without the series; elements and covariance are broadcastable."""

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """The first order of LADDER that suffices for every pair, or `max_order`."""
        allowed = [order for order in LADDER if order <= self.max_order]
        largest = min(largest, 1.0)  # but for rounding
        enough = (k for k in allowed if largest ** (k + 1) <= self.accuracy[dtype])
        return next(enough, allowed[-1])

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """Moments, the elements of the series, then those of `direct`."""
        centre, output, coefficients = self.moments(mean, variance, max(order, 1))
        series = self.series_elements(coefficients[:order], output, variance, dtype)
        own = (element.to(dtype) for element in self.elements(mean, variance))
        return Prepared(centre, output, (*series, *own))

    def series_elements(
        self, coefficients: Tensor, output: Tensor, variance: Tensor, dtype: torch.dtype
    ) -> Elements:
        """1 / sigma, the tail after each order of LADDER, coefficients and their unit."""
        inverse = inverse_deviation(variance)
        if not len(coefficients):
            nothing = coefficients.to(dtype)
            return inverse.to(dtype), nothing, nothing, torch.ones_like(inverse, dtype=dtype)
        largest = self.accuracy[dtype] ** (1 / (len(coefficients) + 1))  # as in `order`
        units = series_units(coefficients, dtype)
        coefficients = flushed(coefficients / units, dtype, largest)
        # In the units of the coefficients, one after the other: their squares may overflow.
        scaled = output.detach() / units / variance.detach() / units
        tails = _relative_tails(coefficients.detach(), scaled)
        return tuple(element.to(dtype) for element in (inverse, tails, coefficients, units))

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the cheapest order; pairs that it does not reach by `direct`."""
        rho = correlation(covariance, left[0], right[0])
        (tails_i, a), (tails_j, b) = left[1:3], right[1:3]
        order, beyond = self.split(rho.detach(), tails_i, tails_j) if len(a) else (0, None)
        if order == 0:
            return self.direct(left[4:], right[4:], covariance)
        result = in_units(covariance, left[3], right[3]) * power_series(rho, a[:order], b[:order])
        if beyond is None:
            return result
        index = beyond.nonzero(as_tuple=True)
        if not len(index[0]):
            return result
        rows, columns = (
            tuple(select_pairs(t, index, rho.shape) for t in side[4:]) for side in (left, right)
        )
        return result.index_put(index, self.direct(rows, columns, covariance[index]))

    def split(self, rho: Tensor, tails_i: Tensor, tails_j: Tensor) -> tuple[int, Tensor | None]:
        """The cheapest order of the series for a block, and which pairs are beyond it, if any."""
        if not rho.numel():
            return LADDER[0], None
        least, most = torch.aminmax(rho)
        largest = max(-float(least), float(most))
        heights = (tails_i.flatten(1).amax(1) * tails_j.flatten(1).amax(1)).tolist()
        limits = [
            (self.accuracy[rho.dtype] / max(height, 1e-300)) ** (1 / (order + 1))
            for order, height in zip(LADDER, heights, strict=False)
        ]
        enough = next((i for i, limit in enumerate(limits) if largest <= limit), len(limits))
        if enough < len(limits) and LADDER[enough] <= SPLIT_COST:  # nothing shorter would pay
            return LADDER[enough], None
        flat = rho.flatten()
        some = flat[:: max(1, flat.numel() // SAMPLED_PAIRS)].abs()
        beyond = (some[:, None] > some.new_tensor(limits[:enough])).sum(0).tolist()
        costs = {
            order: SPLIT_COST + order + self.direct_cost * max(count, 1) / len(some)
            for order, count in zip(LADDER, beyond, strict=False)
        }
        costs[0] = self.direct_cost / 2  # of all pairs: nothing has to be selected
        if enough < len(limits):
            costs[LADDER[enough]] = LADDER[enough]
        order = min(costs, key=costs.__getitem__)
        at = LADDER.index(order) if order else enough
        if at >= enough:
            return order, None
        if at < len(limits) - 1:
            return order, rho.abs() > limits[at]
        root = 1 / (order + 1)  # the last has a limit for each pair
        limit = self.accuracy[rho.dtype] ** root
        return order, rho.abs() * (tails_i[-1] ** root) * (tails_j[-1] ** root) > limit


def select_pairs(tensor: Tensor, index: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """The entries of pairs of a tensor (*any, ...) that broadcasts to this shape in the end."""
    rows = tensor.shape[: tensor.dim() - len(shape)]
    places: tuple[Any, ...] = (..., *index)
    return tensor.expand(*rows, *shape)[places]


def _relative_tails(coefficients: Tensor, output: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    output: Var over the variance of the input, in the units of the coefficients a_k / sigma.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = torch.isfinite(output) & (output > 0)  # not where the input does not vary
    total = torch.where(positive, output, 1)
    rest = (total - squares.sum(0)).clamp(min=0) + rounding(REMAINDER, total.dtype) * total
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST_COEFFICIENTS:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])


@dataclass(frozen=True)
class Declaration:
    """One scalar function: its torch spellings and the factory that takes their options.

    Args:
        name: The first of its torch names.
        functions: Its torch functions.
        in_place: Those that change their argument.
        factory: Takes the options of the torch functions and returns an `Activation`.
        treatment: How the table of operations describes it.

    Example:
        relu = next(one for one in cp.activations.DECLARATIONS if one.name == "relu")
        relu.factory()
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    in_place: tuple[Callable[..., Any], ...]
    factory: Factory
    treatment: str


DECLARATIONS: list[Declaration] = []
"""All that are declared."""


def declare(*names: str, treatment: str) -> Callable[[Factory], Factory]:
    """Declare an activation under every spelling of some torch names, above its factory.

    Args:
        names: Names of the function in torch, `torch.Tensor`, `torch.nn.functional` or
            `torch.special`; those with a trailing underscore, in place, follow from them.
        treatment: How the table of operations describes it.

    Example:
        @declare("hardswish", treatment=QUADRATURE)
        def hardswish(inplace: bool = False) -> Activation:
            return Quadrature(F.hardswish, kinks=(-3.0, 3.0))
    """

    def decorate(factory: Factory) -> Factory:
        functions, in_place = spellings(*names), spellings(*(f"{name}_" for name in names))
        DECLARATIONS.append(Declaration(names[0], functions, in_place, factory, treatment))
        return factory

    return decorate


def spellings(*names: str) -> tuple[Callable[..., Any], ...]:
    """All the functions that torch offers under these names, each once.

    Example:
        cp.activations.spellings("relu")  # (torch.relu, torch.Tensor.relu, F.relu)
    """
    homes = (torch, torch.Tensor, F, torch.special)
    functions = [getattr(home, name) for name in names for home in homes if hasattr(home, name)]
    return tuple(dict.fromkeys(functions))
