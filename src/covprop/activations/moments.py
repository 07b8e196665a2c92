"""Mean, variance and Hermite coefficients of any function, by quadrature of its derivative.

a_k = sigma E[g' He_{k-1}] / sqrt(k!), and g(y) - g(mu) is the integral of g': no moment is the
small difference of large numbers. Grids are refined until nothing moves.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.grids import (
    NODES,
    REACH,
    WIDE,
    Scalar,
    breakpoints,
    hermite_basis,
    panel_count,
    value_and_slope,
)
from covprop.errors import QuadratureError, name_of
from covprop.kernels.gradients import first_order
from covprop.kernels.hermite import hermite_functions
from covprop.kernels.nodes import Panels
from covprop.kernels.normal import density, standard_deviation

FINEST = 32
"""Multiple of the usual number of panels beyond which quadrature gives up."""
HONEST = 1e-7
"""Mismatch, relative to the standard deviation, between g and the integral of its derivative."""
ROUNDING = 64.0
"""In units of machine epsilon: what rounding alone may do to a deviation from the mean."""
CONVERGED = 1e-8
"""Agreement, relative to the standard deviation, of a grid and one of half as many panels: the
error of the finer one is far smaller."""
SMALLEST_STEP = torch.finfo(torch.float64).eps ** (1 / 3)
"""Below this standard deviation, second derivatives are taken at it: rounding would eat them."""
PART = 1024
"""Elements that are refined together."""
HELD = 2**19
"""Values of the function that are held at a time."""


def moments(scalar: Scalar, mean: Tensor, variance: Tensor, order: int) -> list[Tensor]:
    """Mean, variance, coefficients and the grid's fineness, some elements at a time."""
    scalar = scalar.having([tensor.flatten() for tensor in scalar.of_elements])
    _check_parameters(scalar, mean)
    if mean.numel() == 0:
        return [mean, variance, mean.expand(order, *mean.shape), mean]
    # Elements of like width have like grids; wide ones do not burden the others with theirs.
    order_of_width = variance.detach().flatten().argsort(stable=True)
    wide = int((variance > WIDE**2).sum())
    pieces: list[tuple[Tensor, ...]] = []
    for indices in order_of_width.split([mean.numel() - wide, wide]):
        for part in indices.split(PART) if len(indices) else ():
            pieces.append(
                _Moments.apply(
                    mean.flatten()[part], variance.flatten()[part], scalar.take(part), order
                )
            )
    back = order_of_width.argsort()
    joined = [torch.cat(piece, dim=-1)[..., back] for piece in zip(*pieces, strict=True)]
    return [result.reshape(*result.shape[:-1], *mean.shape) for result in joined]


class _Moments(Function):
    """Mean, variance and coefficients over sigma; gradients by Stein's and Price's identities."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, scalar: Scalar, order: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mean, variance)
        ctx.scalar, ctx.order = scalar, order
        fineness, found = _converged(scalar, mean, standard_deviation(variance), order)
        needed = torch.full_like(mean, fineness)
        ctx.mark_non_differentiable(needed)
        return found.mean, found.variance, found.coefficients, needed

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor, *grads: Tensor) -> Any:
        grad_rows = grads[0]
        mean, variance = ctx.saved_tensors
        order = ctx.order
        stddev = standard_deviation(variance)
        _, found = _converged(ctx.scalar, mean, stddev, order + 2)
        step = stddev.clamp(min=SMALLEST_STEP)
        steep = found
        if bool((step > stddev).any()):
            _, steep = _converged(ctx.scalar, mean, step, order + 2)
        rows = steep.coefficients  # a_k / sigma
        into_mean = grad_mean * found.coefficients[0] + grad_variance * found.variance_by_mean
        into_variance = grad_mean * rows[1] / (math.sqrt(2) * step)
        into_variance = into_variance + grad_variance * found.variance_by_variance
        for k in range(1, order + 1):
            # d a_k / d mu = sqrt(k+1) a_{k+1} / sigma, and the heat equation for the variance.
            into_mean = into_mean + grad_rows[k - 1] * math.sqrt(k + 1) * rows[k] / step
            bend = (k - 1) * rows[k - 1] + math.sqrt((k + 1) * (k + 2)) * rows[k + 1]
            into_variance = into_variance + grad_rows[k - 1] * bend / (2 * step.square())
        return into_mean, into_variance, None, None


class _Found(NamedTuple):
    """What a grid says of each element."""

    mean: Tensor
    variance: Tensor
    mismatch: Tensor
    """How far g' is from integrating back to g, in standard deviations; rounding aside."""
    rounding: Tensor
    """The square of what rounding, of values and of arguments, does to a deviation; the smallest
    normal number at least, as denormal ones have few digits."""
    variance_by_mean: Tensor
    variance_by_variance: Tensor
    coefficients: Tensor

    def agrees_with(self, coarse: "_Found") -> bool:
        """Whether mean and variance have not moved, but for rounding."""
        variance, floor = self.variance, self.rounding
        drift = (variance - coarse.variance).abs()
        shift = (self.mean - coarse.mean).square()
        still = (drift <= CONVERGED * variance + floor) & (shift <= CONVERGED**2 * variance + floor)
        return bool(still.all())


class _Grid:
    """g and g' on panels around some elements, with the weights of the normal density.

    fineness multiplies the usual number of panels.
    """

    def __init__(
        self, scalar: Scalar, mean: Tensor, stddev: Tensor, panels: int, fineness: float
    ) -> None:
        self._stddev = stddev
        points = breakpoints(scalar.kinks, mean, stddev, panels, fineness=fineness)
        grid = Panels(points, NODES)
        self._nodes, self._weights = grid.nodes, grid.weights
        self._even = grid.nodes.dim() == 2  # noqa: PLR2004  (panels, nodes), for all elements
        self._normal = grid.weights * density(grid.nodes)
        points = mean[..., None, None] + stddev[..., None, None] * grid.nodes
        self._value, self._slope = value_and_slope(scalar, points)
        self._centre = scalar(mean)
        self._argument = mean.abs() + stddev
        self._rise = stddev[..., None, None] * grid.integral_from_zero(self._slope)

    def found(self, order: int) -> _Found:
        """All that is asked of it, with coefficients up to an order."""
        expected = self._expect(self._rise)
        deviation = self._rise - expected[..., None, None]
        variance = self._expect(deviation.square())
        size = self._expect(self._value.square()) + self._argument.square()
        limits = torch.finfo(size.dtype)
        # Denormal numbers have few digits.
        rounding = (ROUNDING * limits.eps) ** 2 * size + limits.tiny
        return _Found(
            self._centre + expected,
            variance,
            self._mismatch(variance, rounding),
            rounding,
            *self._variance_gradient(deviation),
            self._coefficients(order),
        )

    def _coefficients(self, order: int) -> Tensor:
        if not order:
            return self._slope.new_empty(0, *self._stddev.shape)
        if self._even:
            basis = hermite_basis(len(self._nodes), order).to(self._slope)
            return (self._slope.flatten(-2) @ basis.mT).movedim(-1, 0)
        weighted = self._slope * self._weights
        rows = zip(range(1, order + 1), hermite_functions(self._nodes), strict=False)
        return torch.stack([(weighted * h).sum((-2, -1)) / math.sqrt(k) for k, h in rows])

    def _variance_gradient(self, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """2 Cov(g, g') and, for the variance, E[(g - E g) g' xi] / sigma with its limit g'^2."""
        product = deviation * self._slope
        varies = self._stddev > 0
        by_variance = self._expect(product * self._nodes) / torch.where(varies, self._stddev, 1)
        return 2 * self._expect(product), torch.where(
            varies, by_variance, self._expect(self._slope).square()
        )

    def _mismatch(self, variance: Tensor, rounding: Tensor) -> Tensor:
        difference = self._value - self._centre[..., None, None] - self._rise
        excess = (self._expect(difference.square()) - rounding).clamp(min=0)
        share = torch.where(excess > 0, excess / torch.where(variance > 0, variance, excess), 0)
        return share.sqrt()

    def _expect(self, values: Tensor) -> Tensor:
        return (values * self._normal).sum((-2, -1))


def _on_grids(
    scalar: Scalar, mean: Tensor, stddev: Tensor, order: int, waves: int, fineness: float
) -> _Found:
    """Elements on grids of one fineness, narrow enough for He_waves, as many as may be held."""
    panels = int(panel_count(stddev, waves) * fineness)
    widest = stddev.argmax().reshape(1)
    kinks = scalar.take(widest).kinks
    nodes = breakpoints(kinks, mean[widest], stddev[widest], panels, fineness=fineness)
    size = max(1, HELD // (NODES * nodes.shape[-1]))
    slices = [slice(start, start + size) for start in range(0, len(mean), size)]
    parts = [
        _Grid(scalar.take(part), mean[part], stddev[part], panels, fineness).found(order)
        for part in slices
    ]
    return _Found(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))


def _converged(scalar: Scalar, mean: Tensor, stddev: Tensor, order: int) -> tuple[int, _Found]:
    """A grid on which mean and variance stand still and g' integrates back to g: its fineness."""
    name = name_of(scalar.function)
    with torch.no_grad():
        coarse = _on_grids(scalar, mean, stddev, 0, order, 0.5)
        _check_element_wise(scalar, mean)
        fineness, before = 1, math.inf
        while fineness <= FINEST:
            fine = _on_grids(scalar, mean, stddev, order, order, fineness)
            if not bool(torch.isfinite(fine.variance + fine.mean).all()):
                raise QuadratureError(
                    f"{name} is not finite within {REACH:g} standard deviations of the mean, so "
                    "its moments do not exist; bound it first"
                )
            mismatch, settled = float(fine.mismatch.max()), fine.agrees_with(coarse)
            if settled and mismatch <= HONEST:
                return fineness, fine
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


def _check_parameters(scalar: Scalar, mean: Tensor) -> None:
    """Quadrature gives gradients by the argument alone."""
    if not torch.is_grad_enabled():
        return
    value = scalar.take(slice(1))(mean.detach().flatten()[:1])
    if isinstance(value, Tensor) and value.requires_grad:
        raise QuadratureError(
            f"{name_of(scalar.function)} has parameters that require a gradient, which quadrature "
            "does not give; detach them, or run under torch.no_grad()"
        )


def _check_element_wise(scalar: Scalar, mean: Tensor) -> None:
    """The value at one element must be the same without the others."""
    together, alone = scalar(mean)[-1:], scalar.take(slice(-1, None))(mean[-1:])
    if not bool(torch.isclose(alone, together, rtol=HONEST, equal_nan=True).all()):
        raise QuadratureError(
            f"{name_of(scalar.function)} is not element-wise: an element's value depends on the "
            "others; write a rule for it with @cp.rule"
        )
