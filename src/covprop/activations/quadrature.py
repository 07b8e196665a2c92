"""Any function, by quadrature: moments follow from the derivative, which autograd gives."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements, Prepared
from covprop.activations.correlated import LADDER, Correlated
from covprop.activations.moments import REACH, WIDE, Scalar, leading, moments
from covprop.activations.nested import nested_covariance
from covprop.errors import QuadratureError, name_of
from covprop.kernels.compiled_moments import Compiled
from covprop.kernels.normal import correlation, density, inverse_deviation, standard_deviation
from covprop.kernels.rounding import DEVIATION, rounding

BEYOND_REACH = 1e-6
"""The part of a variance that a standard deviation at either end of the grid may have."""
KINKED_ORDER = 64
"""The longest series with kinks, where coefficients cost more than a few pairs of narrow elements;
those of wide ones cost far more."""
WIDEST = 1e8
"""Standard deviations in units of the features beyond which h is homogeneous but for rounding.

What h(r y) / r has beside its limit, |y| or relu(y) and the like, is within 1 / r of zero, and adds
the square of 1 / (r sigma) to moments.
"""
LARGEST_RATE = 1e30
"""Units of what does not vary: single precision has numbers for them."""
FEATURES = (2.5, 5.0, 10.0, 20.0, 40.0)
"""Distances from zero, in units of the features, between which h is smooth."""
POINTS = 1025
"""Places where an inner function is evaluated to find where it crosses a kink of the outer one."""
MAX_CROSSINGS = 64
"""Of one element and one kink."""
HALVINGS = 100
"""Steps of bisection; more than a float64 has digits, as roots may be near zero."""
HELD_VALUES = 2**20
"""Values that are in memory at a time."""


@final
@dataclass(frozen=True)
class Quadrature(Correlated):
    """A continuous function given as plain torch code, integrated numerically.

    The covariance of a pair is the Hermite series where it is short enough, and an integral of its
    own elsewhere. Parameters, and kinks that are tensors, have the shape (*batch, n) of the means.

    Args:
        function: g(y, *parameters), element by element.
        kinks: Places where its derivatives jump.
        conditional_mean: E[g] from mean and variance in closed form, where there is one: the
            covariance of strongly correlated pairs is then a one-dimensional integral.
        nondecreasing: Whether the function never falls, so that it commutes with maxima.
        parameters: Numbers of each element that the function takes after y.
        compiled: The same function of a compiled kernel, where there is one.

    Example:
        bump = cp.activations.Quadrature(lambda y: torch.exp(-y.abs()), kinks=(0.0,))
        bump.mean(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    """

    function: Callable[..., Tensor]
    kinks: Sequence[float | Tensor] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    nondecreasing: bool = False
    parameters: tuple[Tensor, ...] = ()
    compiled: Compiled | None = None

    integrated: ClassVar[bool] = True
    max_order: ClassVar[int] = LADDER[-1]  # an integral of a pair costs more than any series
    direct_pairs: ClassVar[int] = 0
    direct_cost: ClassVar[float] = 2e6
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 2e-6, torch.float64: 1e-11}

    @property
    def compiles(self) -> bool:
        """Whether a compiled kernel has it."""
        return self.compiled is not None

    def at(self, y: Tensor) -> Tensor:
        """The function itself."""
        return self.function(y, *self.parameters)

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + E[g(y) - g(mu)]."""
        return self.moments(mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Centred second moment of g(y) - g(mu)."""
        return self.moments(mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """E[g' He_{k-1}] / sqrt(k!)."""
        return self.moments(mean, variance, order)[2]

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from one grid."""
        centre, output, coefficients, _ = self._moments(mean, variance, order)
        return centre, output, coefficients

    @property
    def key(self) -> Hashable:
        """The function; kinks and parameters of each element are in the elements."""
        kinks = tuple(None if isinstance(kink, Tensor) else kink for kink in self.kinks)
        return self.function, kinks, len(self.parameters)

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """Moments, coefficients and the fineness that all of them need, from one grid."""
        if self.kinks and not bool((variance > WIDE**2).any()):
            order = min(order, KINKED_ORDER)
        centre, output, coefficients, fineness = self._moments(mean, variance, order)
        # The correlation of a variance at the level of rounding is noise.
        varies = output > (rounding(1, output.dtype) * centre).square()
        own = self._with_fineness(mean, variance, fineness)
        series = self.series_elements(coefficients, output * varies, variance, dtype)
        return Prepared(centre, output, (*series, *(element.to(dtype) for element in own)))

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, as fine as its moments ask for."""
        fineness = moments(self._scalar(), mean, variance, 1)[3]
        finest = int(fineness.max()) if fineness.numel() else 1
        return [(torch.ones_like(mean), self._scalar(finest))]

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """mu, sigma, 1 / sigma, the grid's fineness, and the numbers of each element."""
        fineness = moments(self._scalar(), mean, variance, 1)[3]
        return self._with_fineness(mean, variance, fineness)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """An integral over one variable given the other, in float64."""
        finest = int(max(left[3].max(), right[3].max()))
        rho = correlation(covariance, left[2], right[2])
        tensors = torch.broadcast_tensors(*left[:2], *right[:2], rho, *left[4:], *right[4:])
        pairs = [tensor.reshape(-1).double() for tensor in tensors]
        own, count = pairs[5:], len(left) - 4
        result = nested_covariance(self._scalar(finest), own[:count], own[count:], *pairs[:5])
        return result.reshape(rho.shape).to(covariance.dtype)

    def _with_fineness(self, mean: Tensor, variance: Tensor, fineness: Tensor) -> Elements:
        numbers = mean, standard_deviation(variance), inverse_deviation(variance), fineness
        return *numbers, *self._scalar().of_elements

    def _moments(self, mean: Tensor, variance: Tensor, order: int) -> list[Tensor]:
        """Moments, coefficients and fineness; refused where they come from beyond the grid's reach.

        As those of x exp(x) at a standard deviation of 8: 16 of them from the mean.
        """
        results = moments(self._scalar(), mean, variance, order)
        if self.compiled is not None and self.compiled.bounded:
            return results
        with torch.no_grad():
            centre, output = results[0], results[1]
            far = REACH * standard_deviation(variance)
            ends = torch.stack([mean - far, mean + far], -1)
            rest = (self._scalar()(ends) - centre[..., None]).square().sum(-1) * density(
                mean.new_tensor(REACH)
            )
            size = centre.square() + output + mean.square() + variance
            floor = rounding(DEVIATION, size.dtype) ** 2 * size
            if bool((rest > BEYOND_REACH * output + floor).any()):
                raise QuadratureError(
                    f"the moments of {name_of(self.function)} come from more than {REACH:g} "
                    "standard deviations from the mean; bound it first, or use smaller noise"
                )
        return results

    def _scalar(self, fineness: int = 1) -> Scalar:
        return Scalar(
            self.function, self.kinks, self.conditional_mean, fineness,
            parameters=self.parameters, compiled=self.compiled,
        )  # fmt: skip


@final
@dataclass(frozen=True)
class Rescaled(Activation):
    """g(y) = h(r y) / r for a function h with features of unit size, as the grids expect them.

    Hermite coefficients over the standard deviation are those of h: a_k[g] = a_k[h] / r at a
    standard deviation of h that is r times as large. function: g itself; rate: r > 0.
    """

    inner: Quadrature
    rate: float
    function: Callable[[Tensor], Tensor]

    integrated: ClassVar[bool] = True
    direct_pairs: ClassVar[int] = Quadrature.direct_pairs

    def at(self, y: Tensor) -> Tensor:
        """The function itself."""
        return self.function(y)

    @property
    def compiles(self) -> bool:
        """Whether h does."""
        return self.inner.compiles

    @property
    def nondecreasing(self) -> bool:
        """Whether h is nondecreasing."""
        return self.inner.nondecreasing

    @property
    def key(self) -> Hashable:
        """The function and its rate."""
        return self.inner.key, self.rate

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[h(r y)] / r."""
        return self.moments(mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Var[h(r y)] / r^2."""
        return self.moments(mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """Those of h."""
        return self.moments(mean, variance, order)[2]

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from one grid."""
        rate = self._rate(variance)
        centre, output, coefficients = self.inner.moments(
            rate * mean, rate.square() * variance, order
        )
        return centre / rate, output / rate.square(), coefficients

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """As many coefficients as h."""
        return self.inner.order(largest, dtype)

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """The elements of h, and the unit."""
        rate = self._rate(variance)
        inner = self.inner.prepare(rate * mean, rate.square() * variance, order, dtype)
        elements = *inner.elements, rate.to(dtype)
        return Prepared(inner.mean / rate, inner.variance / rate.square(), elements)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """The elements of h, and the unit."""
        rate = self._rate(variance)
        return *self.inner.elements(rate * mean, rate.square() * variance), rate

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """That of h, in units of both."""
        (*rows, high), (*columns, wide) = left, right
        result = self.inner.pair(tuple(rows), tuple(columns), covariance * high * wide)
        return result / high / wide

    def observed(self, note: Callable[[int], None]) -> "Rescaled":
        """By h."""
        return replace(self, inner=self.inner.observed(note))

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, with breakpoints around its features."""
        del variance
        return [(torch.ones_like(mean), Scalar(self.function, self.kinks))]

    @property
    def kinks(self) -> tuple[float, ...]:
        """Breakpoints around the features of the function."""
        places = {sign * place / self.rate for place in (0.0, *FEATURES) for sign in (-1, 1)}
        return tuple(sorted(places))

    def _rate(self, variance: Tensor) -> Tensor:
        """The rate of each element, limited by WIDEST: a constant to autograd."""
        inverse = inverse_deviation(variance.detach())
        most = torch.where(inverse > 0, WIDEST * inverse, LARGEST_RATE).clamp(max=LARGEST_RATE)
        return most.clamp(max=self.rate)


def crossings(scalar: Scalar, level: float, mean: Tensor, stddev: Tensor) -> Tensor:
    """Where a function crosses a level, by bisection: (*batch, n, count).

    Elements with fewer crossings have the others out of reach.
    """
    shape = mean.shape
    scalar = scalar.having([p.expand_as(mean).flatten() for p in scalar.parameters])
    mean, stddev = mean.detach().flatten(), stddev.detach().flatten()
    step = max(1, HELD_VALUES // POINTS)
    slices = [slice(i, i + step) for i in range(0, len(mean), step)]
    parts = [_crossed(scalar.take(part), level, mean[part], stddev[part]) for part in slices]
    count = max((part.shape[-1] for part in parts), default=0)
    roots = (mean + REACH * stddev)[:, None].repeat(1, count)
    for part, values in zip(slices, parts, strict=True):
        roots[part, : values.shape[-1]] = values
    return roots.reshape(*shape, count)


@torch.no_grad()
def _crossed(scalar: Scalar, level: float, mean: Tensor, stddev: Tensor) -> Tensor:
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=mean.dtype, device=mean.device)
    near = 2.0 ** torch.arange(-20, 21, dtype=mean.dtype, device=mean.device)
    fixed = torch.cat([-near.flip(0), near.new_zeros(1), near]).expand(len(mean), -1)
    low, high = (mean + side * REACH * stddev for side in (-1, 1))
    y = torch.cat([mean[:, None] + stddev[:, None] * grid, fixed], -1)
    y = y.maximum(low[:, None]).minimum(high[:, None]).sort(-1).values
    above = scalar(y) > level
    changes = above[:, 1:] != above[:, :-1]
    count = int(changes.sum(-1).max()) if changes.numel() else 0
    if count > MAX_CROSSINGS:
        raise QuadratureError(
            f"{name_of(scalar.function)} has more than {MAX_CROSSINGS} kinks within reach"
        )
    # The first `count` places of each row, changes first.
    order = changes.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    real = changes.gather(-1, order)
    left, right = y.gather(-1, order), y.gather(-1, order + 1)
    rising = above.gather(-1, order + 1)
    for _ in range(HALVINGS if count else 0):
        middle = (left + right) / 2
        beyond = (scalar(middle) > level) == rising
        left, right = torch.where(beyond, left, middle), torch.where(beyond, middle, right)
    return torch.where(real, (left + right) / 2, leading(high, right))
