"""Any function, by quadrature: nothing derived by hand.

Everything follows from the derivative g', which autograd gives: a_k = sigma E[g' He_{k-1}] /
sqrt(k!), and g(y) - g(mu) is the integral of g', so that no moment is the small difference of
large numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.base import Activation, Elements
from covprop.activations.grids import (
    NODES,
    REACH,
    breakpoints,
    name_of,
    panel_count,
    value_and_slope,
)
from covprop.activations.nested import Scalar, nested_covariance
from covprop.errors import QuadratureError
from covprop.kernels.hermite import hermite_functions, power_series
from covprop.kernels.nodes import Panels
from covprop.kernels.normal import correlation, density, standard_deviation

FINEST = 4096
"""Panels beyond which quadrature gives up."""
CONVERGED = 1e-8
"""Agreement, relative to the standard deviation, of a grid and one of half as many panels: the
error of the finer one is far smaller."""
LADDER = (8, 16, 32, 64)
"""Orders that the exact covariance tries before it integrates a pair directly."""
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

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """mu, sigma, the tail of the series after each order of LADDER, and the coefficients."""
        _, output, coefficients = self._moments(mean, variance, LADDER[-1])
        tails = _relative_tails(coefficients.detach(), output.detach(), variance.detach())
        return (mean, standard_deviation(variance), *tails, *coefficients)

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the first order whose bound suffices; pairs beyond all orders directly."""
        (mean_i, stddev_i), (mean_j, stddev_j) = left[:2], right[:2]
        rho = correlation(covariance, stddev_i, stddev_j)
        size, first = rho.detach().abs(), 2 + len(LADDER)
        for step, order in enumerate(LADDER):
            bound = size ** (order + 1) * (left[2 + step] * right[2 + step])
            hard = bound > ACCURACY[covariance.dtype]
            if not bool(hard.any()):
                break
        a, b = torch.stack(left[first : first + order]), torch.stack(right[first : first + order])
        result = covariance * power_series(rho, a, b)
        if not bool(hard.any()):
            return result
        pairs = [
            t[hard].double()
            for t in torch.broadcast_tensors(mean_i, stddev_i, mean_j, stddev_j, rho)
        ]
        direct = nested_covariance(Scalar(self.function, self.kinks, self.conditional_mean), *pairs)
        return result.masked_scatter(hard, direct.to(result.dtype))

    def _moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        return _Moments.apply(mean, variance, self, order)


class _Moments(Function):
    """Mean, variance and coefficients over sigma; gradients by Stein's and Price's identities."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, activation: Quadrature, order: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mean, variance)
        ctx.activation, ctx.order = activation, order
        grid = _converged_grid(activation, mean, standard_deviation(variance), order)
        return grid.mean(), grid.variance(), grid.coefficients(order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor, grad_rows: Tensor) -> Any:
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
    """g and g' on panels around every element, with the weights of the normal density."""

    def __init__(self, activation: Quadrature, mean: Tensor, stddev: Tensor, panels: int) -> None:
        self._mean, self._stddev = mean, stddev
        grid = Panels(breakpoints(activation.kinks, mean, stddev, panels), NODES)
        self._nodes, self._weights = grid.nodes, grid.weights
        self._normal = grid.weights * density(grid.nodes)
        points = mean[..., None, None] + stddev[..., None, None] * grid.nodes
        self._value, self._slope = value_and_slope(activation.function, points)
        self._centre = activation.function(mean)
        self._rise = stddev[..., None, None] * grid.integral_from_zero(self._slope)
        self._expected_rise = self._expect(self._rise)
        self._deviation = self._rise - self._expected_rise[..., None, None]

    def mean(self) -> Tensor:
        return self._centre + self._expected_rise

    def variance(self) -> Tensor:
        return self._expect(self._deviation.square())

    def coefficients(self, order: int) -> Tensor:
        weighted = self._slope * self._weights
        return torch.stack(
            [
                (weighted * hermite).sum((-2, -1)) / math.sqrt(k)
                for k, hermite in zip(
                    range(1, order + 1), hermite_functions(self._nodes), strict=False
                )
            ]
        )

    def variance_gradient(self) -> tuple[Tensor, Tensor]:
        """2 Cov(g, g') and, for the variance, E[(g - E g) g' xi] / sigma with its limit g'^2."""
        product = self._deviation * self._slope
        varies = self._stddev > 0
        by_variance = self._expect(product * self._nodes) / torch.where(varies, self._stddev, 1)
        return 2 * self._expect(product), torch.where(
            varies, by_variance, self._expect(self._slope).square()
        )

    def derivative_is_honest(self) -> bool:
        """Whether g' integrates back to g, which fails where g jumps."""
        mismatch = self._value - self._centre[..., None, None] - self._rise
        rounding = 1e3 * torch.finfo(mismatch.dtype).eps * self._expect(self._value.square())
        return bool(
            (self._expect(mismatch.square()) <= CONVERGED * self.variance() + rounding).all()
        )

    def _expect(self, values: Tensor) -> Tensor:
        return (values * self._normal).sum((-2, -1))


def _converged_grid(activation: Quadrature, mean: Tensor, stddev: Tensor, order: int) -> _Grid:
    """Double the panels until mean and variance stand still."""
    with torch.no_grad():
        count = panel_count(stddev, order)
        coarse = _Grid(activation, mean, stddev, 2 * math.ceil(count / 4))
        while count <= FINEST:
            fine = _Grid(activation, mean, stddev, count)
            scale = fine.variance()
            drift = (fine.variance() - coarse.variance()).abs()
            shift = (fine.mean() - coarse.mean()).square()
            if not bool(torch.isfinite(scale).all() and torch.isfinite(fine.mean()).all()):
                raise QuadratureError(
                    f"{name_of(activation.function)} is not finite within {REACH:g} standard "
                    "deviations of the mean, so its moments do not exist; bound it first"
                )
            resolved = fine.mean().square() * torch.finfo(scale.dtype).eps
            if bool(((drift <= CONVERGED * scale) | (scale <= resolved**2)).all()) and bool(
                (shift <= CONVERGED**2 * scale + resolved**2).all()
            ):
                break
            coarse, count = fine, 2 * count
        else:
            raise QuadratureError(
                f"the moments of {name_of(activation.function)} did not settle with {FINEST} "
                "panels; name the places where it bends with cp.activation(function, kinks=(...))"
            )
        if not fine.derivative_is_honest():
            raise QuadratureError(
                f"autograd's derivative of {name_of(activation.function)} does not integrate back "
                "to it: it jumps, or defines a gradient of its own; a piecewise-linear function "
                "with jumps is a covprop.activations.Piecewise"
            )
        return fine


def _relative_tails(coefficients: Tensor, output: Tensor, variance: Tensor) -> list[Tensor]:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = (variance > 0) & (output > 0)
    total = torch.where(positive, output / torch.where(positive, variance, 1), 1)
    rounding = 8 * torch.finfo(total.dtype).eps * total
    rest = (total - squares.sum(0)).clamp(min=0) + rounding
    rest = torch.minimum(rest, 2 * LADDER[-1] * squares[-8:].amax(0))
    return [
        torch.where(positive, ((squares[order:].sum(0) + rest) / total).sqrt(), 0)
        for order in LADDER
    ]
