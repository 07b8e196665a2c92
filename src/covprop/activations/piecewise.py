"""Piecewise-linear functions with any number of kinks and jumps."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import (
    Elements,
    MatrixFunction,
    Prepared,
    Segments,
)
from covprop.activations.correlated import LADDER, LAST_COEFFICIENTS, Correlated
from covprop.activations.knots import COST, FINE, Pieces, Side, knots_covariance, knots_formula
from covprop.activations.moments import Scalar
from covprop.kernels import compiled, compiled_moments
from covprop.kernels.compiled_pairs import Direct
from covprop.kernels.kinked import kinked_powers
from covprop.kernels.normal import (
    RECTIFIED_ORDER,
    in_dtype,
    rectified_coefficients,
    rectified_moments,
    standard_deviation,
)
from covprop.kernels.ramps import NARROW

RELU = Segments((0.0,), (0.0, 1.0), 0.0, (0.0,))


@final
@dataclass(frozen=True)
class Piecewise(Correlated):
    """A piecewise-linear function.

    Args:
        function: The function itself, which gives the value at a mean, and at a jump when nothing
            varies.
        knots: Places where the slope changes or the function jumps, ascending.
        slopes: One more than knots; numbers, or tensors of shape (*batch, n).
        start: The value just left of the first knot.
        jumps: The height of the jump at each knot.

    Example:
        step = cp.activations.Piecewise(torch.sign, [0.0], [0.0, 0.0], -1.0, [2.0])
        step.variance(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    """

    function: Callable[[Tensor], Tensor]
    knots: Sequence[float]
    slopes: Sequence[float | Tensor]
    start: float
    jumps: Sequence[float]

    key: ClassVar[Hashable] = None  # knots are in the elements
    compiled_pairs: ClassVar[int] = 2**9
    """As `direct_pairs`, where coefficients are compiled."""

    def __post_init__(self) -> None:
        """Check that the pieces fit together."""
        count, found = len(self.knots), f"{len(self.slopes)} and {len(self.jumps)}"
        if len(self.slopes) != count + 1 or len(self.jumps) != count:
            raise ValueError(f"{count} knots need {count + 1} slopes, {count} jumps, not {found}")
        if not self.knots:
            raise ValueError("a piecewise-linear function needs at least one knot")
        if list(self.knots) != sorted(self.knots):
            raise ValueError(f"knots must ascend, not {tuple(self.knots)}")

    @property
    def has_jumps(self) -> bool:
        """Whether the function is discontinuous."""
        return any(self.jumps)

    def at(self, y: Tensor) -> Tensor:
        """The function itself."""
        return self.function(y)

    def differentiable(self, _: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """The slopes of the pieces, also where torch's function has none; its value at a jump."""
        known = self.value(y)
        return self.function(y.detach()) + (known - known.detach())

    @property
    def kinks(self) -> Sequence[float]:
        """The knots."""
        return self.knots

    @property
    def uniform(self) -> bool:
        """Whether no slope is a tensor."""
        return not any(isinstance(slope, Tensor) for slope in self.slopes)

    @property
    def nondecreasing(self) -> bool:
        """Whether no slope and no jump is negative."""
        return self.uniform and all(step >= 0 for step in (*self.slopes, *self.jumps))

    @property
    def segments(self) -> Segments | None:
        """All that there is, unless a slope is a tensor."""
        slopes = tuple(slope for slope in self.slopes if not isinstance(slope, Tensor))
        found = Segments(tuple(self.knots), slopes, self.start, tuple(self.jumps))
        return found if self.uniform else None

    def uses_series(self, pairs: int, mean: Tensor, variance: Tensor) -> bool:
        """Sooner where coefficients are compiled."""
        cheap = self.uniform and compiled.usable(mean, variance)
        return pairs > (self.compiled_pairs if cheap else self.direct_pairs)

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + sum_t [ w_t sigma m(-|a_t|) -+ h_t Phi(-|a_t|) ], a_t = (mu - t) / sigma."""
        found = self._compiled_moments(mean, variance, 0)
        if found is not None:
            return found.mean
        return self._mean(mean, variance, self._pieces(mean, variance))

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance at rho = 1."""
        found = self._compiled_moments(mean, variance, 0)
        return self._pieces(mean, variance).variance() if found is None else found.variance

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (-1)^k phi(a) [w sigma He_{k-2}(a) - h He_{k-1}(a)] / sqrt(k!), for every knot."""
        found = self._compiled_moments(mean, variance, order)
        if found is not None:
            return found.coefficients
        return self._pieces(mean, variance).coefficients(order)

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from the same positions; those of a ReLU, without gradients, in few operations."""
        found = self._compiled_moments(mean, variance, order)
        if found is not None:
            return found.mean, found.variance, found.coefficients
        if self.segments == RELU and order <= RECTIFIED_ORDER and not torch.is_grad_enabled():
            first, spread, rows = rectified_coefficients(mean, variance)
            return first, spread, rows[:order]
        pieces = self._pieces(mean, variance)
        centre = self._mean(mean, variance, pieces)
        return centre, pieces.variance(), pieces.coefficients(order)

    def marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance from the same positions; those of a ReLU in few operations."""
        found = self._compiled_moments(mean.detach(), variance.detach(), 0)
        followed = compiled.is_followed(mean, variance)
        if found is not None and not followed:
            return found.mean, found.variance
        if found is not None and (pieces := self._continuous_pieces) is not None:
            terms = self._terms(None, published=False, dtype=mean.dtype)
            layer = compiled.Layer(self.function, pieces, terms, self._marginals)
            return compiled.piecewise_marginals(layer, mean, variance, found[:2])
        return self._marginals(mean, variance)

    def _marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.segments == RELU:
            return rectified_moments(mean, variance)
        pieces = self._pieces(mean, variance)
        return self._mean(mean, variance, pieces), pieces.variance()

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """All in one pass, where it is compiled."""
        found = self._compiled_moments(mean, variance, order)
        if found is None:
            return super().prepare(mean, variance, order, dtype)
        series = self.series_elements(found.coefficients, found.variance, variance, dtype)
        heights = [torch.full_like(mean, jump) for jump in self.jumps] if self.has_jumps else []
        nothing = mean.new_empty(0, *mean.shape)
        widths = found.widths if any(self.slopes[1:-1]) else nothing
        own = Side(
            found.inverse, found.slope, found.density, found.positions, found.weights,
            torch.stack(heights) if heights else nothing, widths, torch.zeros_like(widths),
        )  # fmt: skip
        return Prepared(found.mean, found.variance, (*series, *in_dtype(own, dtype)))

    def of_matrix(
        self, mean: Tensor, covariance: Tensor, by_torch: MatrixFunction,
        order: int | None = None, published: bool = False,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Where there are no jumps, and no slopes of single elements."""
        pieces = self._continuous_pieces
        if pieces is None:
            return None
        terms = self._terms(order, published, covariance.dtype)
        layer = compiled.Layer(self.function, pieces, terms, by_torch)
        return compiled.piecewise_layer(layer, mean, covariance)

    @property
    def compiles_matrix(self) -> bool:
        """Where it is continuous, and the same function of every element."""
        return self._continuous_pieces is not None

    @cached_property
    def _continuous_pieces(self) -> compiled.Pieces | None:
        if not self.uniform or self.has_jumps:
            return None
        knots, slopes = (tuple(map(float, row)) for row in (self.knots, self.slopes))
        return compiled.Pieces(knots, slopes)

    @classmethod
    @lru_cache(maxsize=64)
    def _terms(cls, order: int | None, published: bool, dtype: torch.dtype) -> compiled.Terms:
        if order is not None:
            return compiled.Terms((order,), published, narrow=NARROW)
        return compiled.Terms(
            tuple(k for k in LADDER if k <= cls.max_order), bounded=True,
            accuracy=cls.accuracy[dtype], few=cls.compiled_pairs, direct_cost=COST,
            last=LAST_COEFFICIENTS, narrow=NARROW, fine=FINE[dtype],
        )  # fmt: skip

    def _compiled_moments(
        self, mean: Tensor, variance: Tensor, order: int
    ) -> compiled_moments.PiecewiseMoments | None:
        """By a compiled kernel, which knows no narrow segments and no slopes of single elements."""
        if not self.uniform or mean.shape != variance.shape or not compiled.usable(mean, variance):
            return None
        pieces = [
            [float(number) for number in row] for row in (self.knots, self.slopes, self.jumps)
        ]
        values = self.value(mean) if self.has_jumps else self.function(mean)
        found = compiled_moments.piecewise(mean, variance, values, pieces, order, NARROW)
        if found is None or not self.has_jumps:
            return found
        centre = torch.where(variance > 0, found.mean, self.function(mean))
        return found._replace(mean=centre)

    def _pieces(self, mean: Tensor, variance: Tensor) -> Pieces:
        return Pieces(mean, variance, self.knots, self.slopes, self.jumps)

    def _mean(self, mean: Tensor, variance: Tensor, pieces: Pieces) -> Tensor:
        at_mean = self._value(mean, pieces.slopes)
        if self.has_jumps:
            return torch.where(variance > 0, pieces.mean(at_mean), self.function(mean))
        # Not added up from the first knot, which rounds; with the slope right of a knot.
        own = self.function(mean.detach()).detach() + (at_mean - at_mean.detach())
        return pieces.mean(torch.where(pieces.narrow, at_mean, own))

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """The fields of `Side`."""
        return self._pieces(mean, variance).side()

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """c E[g'] E[g'] + sum_tu w_t w_u sigma sigma K1, and K0 and mixed terms for the jumps."""
        return knots_covariance(left, right, covariance)

    def compiled_direct(self, left: Elements, right: Elements) -> Direct | None:
        """The sum over knots, unless there are jumps or narrow segments."""
        return knots_formula(left, right)

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, or its segments if their slopes are those of single elements."""
        del variance
        if self.uniform:
            jumps = [(t, h) for t, h in zip(self.knots, self.jumps, strict=True) if h]
            scalar = Scalar(self.function, self.knots, self.mean, jumps=jumps)
            return [(torch.ones_like(mean), scalar)]
        terms: list[tuple[Tensor, Scalar]] = []
        if self.has_jumps:
            flat = [0.0] * len(self.slopes)
            steps = partial(self._value, slopes=flat)
            terms = Piecewise(steps, self.knots, flat, self.start, self.jumps).scalars(mean, mean)
        for k, slope in enumerate(self.slopes):
            factor = torch.as_tensor(slope, dtype=mean.dtype, device=mean.device).expand_as(mean)
            terms.append((factor, self._segment(k)))
        return terms

    def powers(self, mean: Tensor, variance: Tensor, counts: Sequence[int]) -> list[Tensor] | None:
        """Closed where there is one kink, as of a ReLU."""
        if len(self.knots) > 1 or self.has_jumps:
            return None
        stddev = standard_deviation(variance)
        before, after = self.slopes
        return kinked_powers(mean - self.knots[0], stddev, before, after, counts)

    def _segment(self, k: int) -> Scalar:
        """A function of slope one on a segment, and constant elsewhere."""
        ends = [-math.inf, *self.knots, math.inf][k : k + 2]
        function = partial(torch.clamp, min=ends[0], max=ends[1])
        knots = [end for end in ends if math.isfinite(end)]
        slopes = [0.0] * (k > 0) + [1.0] + [0.0] * (k < len(self.knots))
        return Scalar(function, knots, continuous(function, knots, slopes, knots[0]).mean)

    def value(self, y: Tensor) -> Tensor:
        """g(y), continuous from the right."""
        return self._value(y, self.slopes)

    def _value(self, y: Tensor, slopes: Sequence[float | Tensor]) -> Tensor:
        """The function of these slopes, continuous from the right."""
        result = self.start + slopes[0] * (y - self.knots[0])
        level: float | Tensor = self.start
        for i, knot in enumerate(self.knots):
            if i > 0:
                level = level + slopes[i] * (knot - self.knots[i - 1])
            level = level + self.jumps[i]
            result = torch.where(y >= knot, level + slopes[i + 1] * (y - knot), result)
        return result


def continuous(
    function: Callable[[Tensor], Tensor],
    knots: Sequence[float],
    slopes: Sequence[float | Tensor],
    start: float,
) -> Piecewise:
    """Build a piecewise-linear function without jumps."""
    return Piecewise(function, knots, slopes, start, [0.0] * len(knots))
