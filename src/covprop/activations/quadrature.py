"""Any function, by quadrature: nothing derived by hand.

Everything follows from the derivative g', which autograd gives: a_k = sigma E[g' He_{k-1}] /
sqrt(k!), and g(y) - g(mu) is the integral of g', so that no moment is the small difference of
large numbers.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.base import Activation, Elements
from covprop.activations.grids import (
    NODES,
    REACH,
    WIDE,
    breakpoints,
    hermite_basis,
    panel_count,
    value_and_slope,
)
from covprop.activations.nested import Scalar, nested_covariance
from covprop.errors import QuadratureError, name_of
from covprop.kernels.gradients import first_order
from covprop.kernels.hermite import hermite_functions, power_series
from covprop.kernels.nodes import Panels
from covprop.kernels.normal import correlation, density, standard_deviation

FINEST = 32
"""Multiple of the usual number of panels beyond which quadrature gives up."""
HONEST = 1e-7
"""Mismatch, relative to the standard deviation, between g and the integral of its derivative."""
ROUNDING = 64.0
"""In units of machine epsilon: what rounding alone may do to a deviation from the mean."""
CONVERGED = 1e-8
"""Agreement, relative to the standard deviation, of a grid and one of half as many panels: the
error of the finer one is far smaller."""
PART = 1024
"""Elements whose grids are held at a time."""
LADDER = (8, 16, 32, 64, 128, 256, 512)
"""Orders that the exact covariance tries before it integrates a pair directly."""
LONGEST_WITH_KINKS = 64
"""With kinks the coefficients cost more and fall more slowly."""
LAST = 8
"""How many of the last coefficients tell the size of those beyond."""
ACCURACY = {torch.float32: 2e-6, torch.float64: 1e-11}
"""Bound of the exact covariance's error, relative to the standard deviations: ends the series."""
SMALLEST_STEP = torch.finfo(torch.float64).eps ** (1 / 3)
"""Below this standard deviation, second derivatives are taken at it: rounding would eat them."""


@final
@dataclass(frozen=True)
class Quadrature(Activation):
    """A continuous function given as plain torch code.

    kinks: where its derivatives jump; conditional_mean(mean, variance): E[g] in closed form, where
    there is one, turns the covariance of strongly correlated pairs into a one-dimensional integral.
    """

    function: Callable[[Tensor], Tensor]
    kinks: Sequence[float] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + E[g(y) - g(mu)]."""
        return self._moments(mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Centred second moment of g(y) - g(mu)."""
        return self._moments(mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """E[g' He_{k-1}] / sqrt(k!)."""
        return self._moments(mean, variance, order)[2]

    @property
    def key(self) -> Hashable:
        """The function."""
        return (self.function, tuple(self.kinks))

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """mu, sigma, the grid's fineness, the tail after each order of LADDER, coefficients."""
        order = LADDER[-1] if not self.kinks else LONGEST_WITH_KINKS
        centre, output, coefficients, fineness = self._moments(mean, variance, order)
        # A variance at the level of rounding has no correlation to speak of.
        varies = output > (torch.finfo(output.dtype).eps * centre).square()
        tails = _relative_tails(coefficients.detach(), output.detach() * varies, variance.detach())
        return mean, standard_deviation(variance), fineness, tails, coefficients

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the first order whose bound suffices; pairs beyond all orders directly."""
        mean_i, stddev_i, fineness_i, tail_i, a = left
        mean_j, stddev_j, fineness_j, tail_j, b = right
        rho = correlation(covariance, stddev_i, stddev_j)
        size = rho.detach().abs()
        for order, r_i, r_j in zip(LADDER, tail_i, tail_j, strict=False):
            hard = size ** (order + 1) * (r_i * r_j) > ACCURACY[covariance.dtype]
            if not bool(hard.any()):
                break
        result = covariance * power_series(rho, a[:order], b[:order])
        if not bool(hard.any()):
            return result
        pairs = [
            t[hard].double()
            for t in torch.broadcast_tensors(mean_i, stddev_i, mean_j, stddev_j, rho)
        ]
        finest = int(max(fineness_i.max(), fineness_j.max()))
        scalar = Scalar(self.function, self.kinks, self.conditional_mean, finest)
        direct = nested_covariance(scalar, *pairs)
        return result.masked_scatter(hard, direct.to(result.dtype))

    def _moments(self, mean: Tensor, variance: Tensor, order: int) -> list[Tensor]:
        """Mean, variance, coefficients and the grid's fineness, some elements at a time."""
        _check_parameters(self.function, mean)
        if mean.numel() == 0:
            return [mean, variance, mean.expand(order, *mean.shape), mean]
        # Wide elements have grids of their own, and do not burden the others with them.
        order_of_width = (variance.flatten() > WIDE**2).long().argsort(stable=True)
        count = int((variance > WIDE**2).sum())
        sizes = [mean.numel() - count, count]
        pieces: list[tuple[Tensor, ...]] = []
        for indices in order_of_width.split(sizes):
            for part in indices.split(PART) if len(indices) else ():
                pieces.append(
                    _Moments.apply(mean.flatten()[part], variance.flatten()[part], self, order)
                )
        back = order_of_width.argsort()
        joined = [torch.cat(piece, dim=-1)[..., back] for piece in zip(*pieces, strict=True)]
        return [result.reshape(*result.shape[:-1], *mean.shape) for result in joined]


class _Moments(Function):
    """Mean, variance and coefficients over sigma; gradients by Stein's and Price's identities."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, activation: Quadrature, order: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mean, variance)
        ctx.activation, ctx.order = activation, order
        grid = _converged_grid(activation, mean, standard_deviation(variance), order)
        fineness = torch.full_like(mean, grid.fineness)
        ctx.mark_non_differentiable(fineness)
        return grid.mean(), grid.variance(), grid.coefficients(order), fineness

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor, *grads: Tensor) -> Any:
        grad_rows = grads[0]
        mean, variance = ctx.saved_tensors
        order = ctx.order
        stddev = standard_deviation(variance)
        grid = _converged_grid(ctx.activation, mean, stddev, order + 2)
        by_mean, by_variance = grid.variance_gradient()
        step = stddev.clamp(min=SMALLEST_STEP)
        steep = grid
        if bool((step > stddev).any()):
            steep = _converged_grid(ctx.activation, mean, step, order + 2)
        rows = steep.coefficients(order + 2)  # a_k / sigma
        into_mean = grad_mean * grid.coefficients(1)[0] + grad_variance * by_mean
        into_variance = grad_mean * rows[1] / (math.sqrt(2) * step) + grad_variance * by_variance
        for k in range(1, order + 1):
            # d a_k / d mu = sqrt(k+1) a_{k+1} / sigma, and the heat equation for the variance.
            into_mean = into_mean + grad_rows[k - 1] * math.sqrt(k + 1) * rows[k] / step
            bend = (k - 1) * rows[k - 1] + math.sqrt((k + 1) * (k + 2)) * rows[k + 1]
            into_variance = into_variance + grad_rows[k - 1] * bend / (2 * step.square())
        return into_mean, into_variance, None, None


class _Grid:
    """g and g' on panels around every element, with the weights of the normal density.

    fineness multiplies the usual number of panels.
    """

    def __init__(
        self, activation: Quadrature, mean: Tensor, stddev: Tensor, order: int, fineness: float
    ) -> None:
        self.fineness, self._stddev = fineness, stddev
        panels = int(panel_count(stddev, order) * fineness)
        grid = Panels(breakpoints(activation.kinks, mean, stddev, panels), NODES)
        self._nodes, self._weights = grid.nodes, grid.weights
        self._even = grid.nodes.dim() == 2  # noqa: PLR2004  (panels, nodes), for all elements
        self._normal = grid.weights * density(grid.nodes)
        points = mean[..., None, None] + stddev[..., None, None] * grid.nodes
        self._value, self._slope = value_and_slope(activation.function, points)
        self._centre = activation.function(mean)
        self._argument = mean.abs() + stddev
        self._rise = stddev[..., None, None] * grid.integral_from_zero(self._slope)
        self._expected_rise = self._expect(self._rise)
        self._deviation = self._rise - self._expected_rise[..., None, None]

    def mean(self) -> Tensor:
        return self._centre + self._expected_rise

    def variance(self) -> Tensor:
        return self._expect(self._deviation.square())

    def coefficients(self, order: int) -> Tensor:
        if self._even:
            basis = hermite_basis(len(self._nodes), order).to(self._slope)
            return (self._slope.flatten(-2) @ basis.mT).movedim(-1, 0)
        weighted = self._slope * self._weights
        rows = zip(range(1, order + 1), hermite_functions(self._nodes), strict=False)
        return torch.stack([(weighted * h).sum((-2, -1)) / math.sqrt(k) for k, h in rows])

    def variance_gradient(self) -> tuple[Tensor, Tensor]:
        """2 Cov(g, g') and, for the variance, E[(g - E g) g' xi] / sigma with its limit g'^2."""
        product = self._deviation * self._slope
        varies = self._stddev > 0
        by_variance = self._expect(product * self._nodes) / torch.where(varies, self._stddev, 1)
        return 2 * self._expect(product), torch.where(
            varies, by_variance, self._expect(self._slope).square()
        )

    def mismatch(self) -> float:
        """How far g' is from integrating back to g, in standard deviations; rounding aside."""
        difference = self._value - self._centre[..., None, None] - self._rise
        excess = (self._expect(difference.square()) - self._rounding()).clamp(min=0)
        variance = self.variance()
        share = torch.where(excess > 0, excess / torch.where(variance > 0, variance, excess), 0)
        return float(share.max().sqrt())

    def agrees_with(self, coarse: "_Grid") -> bool:
        """Whether mean and variance have not moved, but for rounding."""
        variance, floor = self.variance(), self._rounding()
        drift = (variance - coarse.variance()).abs()
        shift = (self.mean() - coarse.mean()).square()
        still = (drift <= CONVERGED * variance + floor) & (shift <= CONVERGED**2 * variance + floor)
        return bool(still.all())

    def _rounding(self) -> Tensor:
        """The square of what rounding, of values and of arguments, does to a deviation."""
        size = self._expect(self._value.square()) + self._argument.square()
        return (ROUNDING * torch.finfo(size.dtype).eps) ** 2 * size

    def _expect(self, values: Tensor) -> Tensor:
        return (values * self._normal).sum((-2, -1))


def _converged_grid(activation: Quadrature, mean: Tensor, stddev: Tensor, order: int) -> _Grid:
    """Double the panels until mean and variance stand still and g' integrates back to g."""
    name = name_of(activation.function)
    with torch.no_grad():
        coarse = _Grid(activation, mean, stddev, order, 0.5)
        _check_element_wise(activation.function, mean)
        fineness, before = 1, math.inf
        while fineness <= FINEST:
            fine = _Grid(activation, mean, stddev, order, fineness)
            if not bool(torch.isfinite(fine.variance() + fine.mean()).all()):
                raise QuadratureError(
                    f"{name} is not finite within {REACH:g} standard deviations of the mean, so "
                    "its moments do not exist; bound it first"
                )
            mismatch, settled = fine.mismatch(), fine.agrees_with(coarse)
            if settled and mismatch <= HONEST:
                return fine
            if settled and mismatch > before / 2:
                raise QuadratureError(
                    f"autograd's derivative of {name} does not integrate back to it: it jumps, or "
                    "defines a gradient of its own; a piecewise-linear function with jumps is a "
                    "covprop.activations.Piecewise"
                )
            coarse, fineness, before = fine, 2 * fineness, mismatch
    raise QuadratureError(
        f"the moments of {name} do not settle on ever finer grids; name the places where it bends "
        "with cp.activation(function, kinks=(...))"
    )


def _check_parameters(function: Callable[[Tensor], Tensor], mean: Tensor) -> None:
    """Quadrature gives gradients by the argument alone."""
    if not torch.is_grad_enabled():
        return
    value = function(mean.detach().flatten()[:1])
    if isinstance(value, Tensor) and value.requires_grad:
        raise QuadratureError(
            f"{name_of(function)} has parameters that require a gradient, which quadrature does "
            "not give; detach them, or run under torch.no_grad()"
        )


def _check_element_wise(function: Callable[[Tensor], Tensor], mean: Tensor) -> None:
    """The value at one element must be the same without the others."""
    together, alone = function(mean).flatten()[-1:], function(mean.flatten()[-1:])
    if not bool(torch.isclose(alone, together, rtol=HONEST, equal_nan=True).all()):
        raise QuadratureError(
            f"{name_of(function)} is not element-wise: an element's value depends on the others; "
            "write a rule for it with @cp.rule"
        )


def _relative_tails(coefficients: Tensor, output: Tensor, variance: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = (variance > 0) & (output > 0)
    total = torch.where(positive, output / torch.where(positive, variance, 1), 1)
    rounding = 8 * torch.finfo(total.dtype).eps * total
    rest = (total - squares.sum(0)).clamp(min=0) + rounding
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])
