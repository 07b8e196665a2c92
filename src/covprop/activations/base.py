"""Scalar functions of Gaussians: what is known of one, and how they are declared."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.moments import Scalar

Observed = TypeVar("Observed", bound="Activation")
Factory: TypeAlias = Callable[..., "Activation"]
"""Options of torch functions -> their activation."""
Elements: TypeAlias = tuple[Tensor, ...]
"""Numbers of each element that `pair` needs: tensors of shape (*any, *batch, n)."""

MatrixFunction: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and covariance matrix of a vector -> those of its activation."""

CLOSED = "exact: closed form"
INTEGRAL = "exact: closed form and one-dimensional integral"
QUADRATURE = "accurate to 1e-8: quadrature and as many terms as the bound needs"
"""How the table of operations describes what is done with an activation."""


class Prepared(NamedTuple):
    """Moments of an activated vector (*batch, n), and what the covariances of its pairs need."""

    mean: Tensor
    variance: Tensor
    elements: Elements


class Segments(NamedTuple):
    """A piecewise-linear function, the same of every element, as `Piecewise` takes it."""

    knots: tuple[float, ...]
    slopes: tuple[float, ...]
    start: float
    jumps: tuple[float, ...]


class Activation(ABC):
    """The moments of g(y) for y ~ N(mean, variance), element by element.

    Means and variances are float64 tensors of shape (*batch, n): this part is O(n), and its
    accuracy bounds everything after it. `pair` is O(n^2) and works in the dtype of the covariance.

    Example:
        tanh = cp.activations.Quadrature(torch.tanh)  # any continuous function is an Activation
        cp.propagate(model, x, method=cp.GaussianLayers(activations={torch.sigmoid: tanh}))
    """

    integrated: ClassVar[bool] = False
    """Whether its moments are integrals on a grid of points for each element."""

    direct_pairs: ClassVar[int] = sys.maxsize
    """The number of pairs up to which `pair` uses no coefficients."""

    periodic: ClassVar[bool] = False
    """Whether it has features of unit size everywhere, not only near zero and its kinks."""

    def uses_series(self, pairs: int, mean: Tensor, variance: Tensor) -> bool:
        """Whether coefficients are worth their cost for so many pairs of these elements."""
        del mean, variance
        return pairs > self.direct_pairs

    @abstractmethod
    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[g(y)]."""

    def at(self, y: Tensor) -> Tensor:
        """g(y), for a y that does not vary."""
        return self.mean(y, torch.zeros_like(y))

    def differentiable(self, function: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """g(y) by torch's own function, with the derivative of g also where torch's has none."""
        return function(y)

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
    def compiles(self) -> bool:
        """Whether a compiled kernel has its moments."""
        return False

    @property
    def compiles_matrix(self) -> bool:
        """Whether a compiled kernel has all of a covariance, and its backward pass."""
        return False

    @property
    def kinks(self) -> Sequence[float | Tensor]:
        """Places where its derivative jumps; tensors are of each element, (*batch, n)."""
        return ()

    @property
    def segments(self) -> Segments | None:
        """Its straight lines, if it is made of such and the same function of every element."""
        return None

    @property
    def power_coefficients(self) -> Sequence[float | Tensor] | None:
        """Coefficients of y^0, y^1 ..., if it is a polynomial."""
        return None

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
        scalar = Scalar(
            function,
            conditional_mean=self.mean,
            conditional_slopes=partial(self.coefficients, order=2),
            periodic=self.periodic,
        )
        return [(torch.ones_like(mean), scalar)]

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

    def of_matrix(
        self, mean: Tensor, covariance: Tensor, by_torch: MatrixFunction,
        order: int | None = None, published: bool = False,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Mean and covariance matrix by one compiled kernel, None where there is none.

        mean (*batch, n), covariance (*batch, n, n); by_torch: the same function as torch code;
        order: of the series of pairs, None for pairs to rounding; published: whether the variances
        are those of the series.
        """
        del mean, covariance, by_torch, order, published
        return None

    def observed(self, note: Callable[[int], None]) -> "Activation":
        """A copy that notes how many terms the series of its pairs take, 0 for none at all."""
        del note
        return self

    @abstractmethod
    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] from what is prepared of i and of j, and Cov[y_i, y_j].

        left has shapes (..., rows, 1), right (..., 1, columns), covariance (*batch, rows, columns).
        """

    def pair_matrix(
        self, elements: Sequence[Tensor], covariance: Tensor, variance: Tensor
    ) -> Tensor | None:
        """All pairs of a symmetric matrix by a compiled kernel, None where there is none.

        elements: as prepared, in the dtype of the covariance; variance: the diagonal of the result.
        """
        del elements, covariance, variance
        return None


def noting(
    activation: Observed, note: Callable[[int], None], **orders: Callable[[Any, Any], int | None]
) -> Observed:
    """A copy whose calls of some methods are noted: (arguments, result) -> the order, if any."""
    copied = copy(activation)
    object.__setattr__(
        copied, "of_matrix", lambda *_, **__: None
    )  # which tells nothing of its series

    def watched(name: str, order_of: Callable[[Any, Any], int | None]) -> Callable[..., Any]:
        function = getattr(activation, name)

        def call(*args: Any) -> Any:
            result = function(*args)
            order = order_of(args, result)
            if order is not None:
                note(order)
            return result

        return call

    for name, order_of in orders.items():
        object.__setattr__(copied, name, watched(name, order_of))  # it may be frozen
    return copied


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
        functions, in_place = spellings(*names), in_place_spellings(*names)
        DECLARATIONS.append(Declaration(names[0], functions, in_place, factory, treatment))
        return factory

    return decorate


def spellings(*names: str) -> tuple[Callable[..., Any], ...]:
    """All the functions that torch offers under these names, each once.

    Args:
        names: Names in torch, `torch.Tensor`, `torch.nn.functional` or `torch.special`.

    Example:
        cp.extending.spellings("relu")  # (torch.relu, torch.Tensor.relu, F.relu)
    """
    homes = (torch, torch.Tensor, F, torch.special)
    functions = [getattr(home, name) for name in names for home in homes if hasattr(home, name)]
    return tuple(dict.fromkeys(functions))


def in_place_spellings(*names: str) -> tuple[Callable[..., Any], ...]:
    """The in-place forms of these functions, whose names end in an underscore.

    Args:
        names: Names without the underscore.

    Example:
        cp.extending.in_place_spellings("relu")  # (torch.relu_, torch.Tensor.relu_, F.relu_)
    """
    return spellings(*(f"{name}_" for name in names))
