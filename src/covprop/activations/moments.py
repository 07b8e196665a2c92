"""Moments and Hermite coefficients of any scalar function, by quadrature of its derivative.

a_k = sigma E[g' He_{k-1}] / sqrt(k!), and g(y) - g(mu) is the integral of g': no moment is the
small difference of large numbers. Grids are refined until mean and variance converge.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.errors import QuadratureError, name_of
from covprop.kernels.compiled import usable
from covprop.kernels.compiled_moments import Compiled, Rule, quadrature
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import density, standard_deviation
from covprop.kernels.polynomials import Panels, graded, hermite_functions, insert, legendre
from covprop.kernels.rounding import DEVIATION, DIFFERENCE_STEP, rounding

REACH = 12.0
"""Quadrature covers this many standard deviations on either side."""
NODES = 10
"""Gauss-Legendre nodes on each panel."""
WIDE = 8.0
"""Standard deviation above which an even grid would need too many panels."""
FINEST = 32
"""Multiple of the usual number of panels beyond which quadrature gives up."""
MISMATCH = 1e-7
"""Largest mismatch, in standard deviations, between g and the integral of its derivative."""
CONVERGED = 1e-8
"""Agreement, in standard deviations, of a grid and one of half as many panels: the error of the
finer one is far smaller."""
PART = 1024
"""Elements that are refined together."""
LOW_ORDER = 4
"""Coefficients up to which a compiled kernel makes them faster than a matrix product."""
HELD_VALUES = 2**19
"""Values of the function that are in memory at a time."""


@dataclass(frozen=True)
class Scalar:
    """A scalar function g(y, *parameters) as plain torch code, for quadrature.

    kinks: where its derivatives jump; conditional_mean: E[g] from mean and variance, if closed;
    fineness: the multiple of the usual number of panels that its moments needed; jumps: those of
    its kinks where it jumps, and by how much; parameters: numbers of each element. Parameters, and
    kinks that are tensors, have the shape of the elements. compiled: the same function of a kernel.
    conditional_slopes: E[g'] and sigma E[g''] / sqrt(2) likewise; periodic: as of an `Activation`.
    """

    function: Callable[..., Tensor]
    kinks: Sequence[float | Tensor] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    fineness: int = 1
    jumps: Sequence[tuple[float, float]] = ()
    parameters: tuple[Tensor, ...] = ()
    compiled: Compiled | None = None
    conditional_slopes: Callable[[Tensor, Tensor], Tensor] | None = None
    periodic: bool = False

    def __call__(self, y: Tensor) -> Tensor:
        """g(y), for y (*elements, *any)."""
        return self.function(y, *(leading(parameter, y) for parameter in self.parameters))

    @property
    def of_elements(self) -> tuple[Tensor, ...]:
        """The numbers of each element: kinks, then parameters."""
        return (*(kink for kink in self.kinks if isinstance(kink, Tensor)), *self.parameters)

    def having(self, tensors: Sequence[Tensor]) -> "Scalar":
        """Replace the numbers of each element; kinks of a single one become plain numbers."""
        if not tensors:
            return self
        rest = iter(tensors)
        kinks = [next(rest) if isinstance(kink, Tensor) else kink for kink in self.kinks]
        if tensors[0].numel() == 1:
            kinks = [float(kink) for kink in kinks]
        return replace(self, kinks=kinks, parameters=tuple(rest))

    def take(self, index: Any) -> "Scalar":
        """The function of some of the elements."""
        return self.having([tensor[index] for tensor in self.of_elements])


def leading(number: Any, like: Tensor) -> Any:
    """Reshape a number of each element (*elements), to be broadcast to (*elements, *any)."""
    if not isinstance(number, Tensor):
        return number
    return number.reshape(*number.shape, *(1,) * (like.dim() - number.dim()))


def breakpoints(
    kinks: Sequence[float | Tensor],
    mean: Tensor,
    stddev: Tensor,
    panels: int,
    reach: float = REACH,
    fineness: float = 1.0,
) -> Tensor:
    """An even grid over `reach` standard deviations, the kinks of each element sorted in.

    Where the standard deviation is wide against features of unit size, panels that grow with the
    distance from zero and from the kinks are sorted in too, as many as the fineness asks for. Shape
    (*shape of mean, breakpoints), or (breakpoints,) if the grid is the same for all elements.
    """
    grid = torch.linspace(-reach, reach, panels + 1, dtype=mean.dtype, device=mean.device)
    grid[panels // 2] = 0
    widest = float(stddev.max()) if stddev.numel() else 0.0
    points = list(kinks)
    if widest > WIDE:
        points = graded(kinks, 1 / fineness, fineness, widest * 2 * reach / panels)
    scale = torch.where(stddev > 0, stddev, 1)
    places = [(leading(point, mean) - mean) / scale for point in points]
    return insert(grid.expand(*mean.shape, panels + 1), places) if places else grid


def panel_count(stddev: Tensor, order: int = 1, periodic: bool = False) -> int:
    """A multiple of 4; narrow enough for features of unit size and for the waves of He_order.

    In powers of two, so that few different grids are ever made.
    """
    widest = float(stddev.max()) if stddev.numel() else 0.0
    # Of wide elements the graded points resolve the function, the even ones the density.
    graded_points = widest > WIDE and not periodic
    needed = max(1.0, 0.0 if graded_points else widest / 2, math.sqrt(order) / 8)
    panels = 2 * math.ceil(REACH) * 2 ** math.ceil(math.log2(needed))
    if panels * NODES > HELD_VALUES:
        raise QuadratureError(
            f"a periodic function has too many waves within a standard deviation of {widest:.3g} "
            "to be integrated with another one; use smaller noise, or sampling"
        )
    return panels


@lru_cache(maxsize=8)
def hermite_basis(panels: int, order: int) -> Tensor:
    """What turns g' at the nodes of an even grid into a_k / sigma, k = 1 ... order.

    Shape (order, panels * NODES), float64: weights times He_{k-1} phi / sqrt(k!).
    """
    zero = torch.zeros((), dtype=torch.float64)
    grid = Panels(breakpoints((), zero, zero, panels), NODES)
    basis = torch.empty(order, grid.nodes.numel(), dtype=zero.dtype)
    for row, (k, h) in zip(basis, enumerate(hermite_functions(grid.nodes), start=1), strict=False):
        row.copy_((grid.weights * h / math.sqrt(k)).flatten())
    return basis


def value_and_slope(scalar: Scalar, y: Tensor) -> tuple[Tensor, Tensor]:
    """g(y) and g'(y), the latter by autograd, whatever the caller's mode of it."""
    with torch.inference_mode(False), torch.enable_grad():
        point = y.detach().clone().requires_grad_()  # a clone: y may be an inference tensor
        value = scalar(point)
        if not isinstance(value, Tensor) or value.shape != y.shape:
            raise QuadratureError(
                f"{name_of(scalar.function)} does not map a tensor to one of the same shape, so it "
                "is not element-wise; write a rule for it with @cp.rule"
            )
        if not value.requires_grad:
            return value.detach(), torch.zeros_like(y)
        return value.detach(), torch.autograd.grad(value.sum(), point)[0]


def moments(scalar: Scalar, mean: Tensor, variance: Tensor, order: int) -> list[Tensor]:
    """Mean, variance, coefficients and the grid's fineness, some elements at a time."""
    scalar = scalar.having([tensor.flatten() for tensor in scalar.of_elements])
    _check_parameters(scalar, mean)
    if mean.numel() == 0:
        return [mean, variance, mean.expand(order, *mean.shape), mean]
    # Elements of like width have like grids; wide ones do not burden the others with theirs.
    by_width = variance.detach().flatten().argsort(stable=True)
    wide = int((variance > WIDE**2).sum())
    pieces = [
        _Moments.apply(mean.flatten()[part], variance.flatten()[part], scalar.take(part), order)
        for indices in by_width.split([mean.numel() - wide, wide])
        for part in (indices.split(PART) if len(indices) else ())
    ]
    original = by_width.argsort()
    joined = [torch.cat(piece, dim=-1)[..., original] for piece in zip(*pieces, strict=True)]
    return [result.reshape(*result.shape[:-1], *mean.shape) for result in joined]


class _Moments(Function):
    """Mean, variance and coefficients over sigma; gradients by Stein's and Price's identities."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, scalar: Scalar, order: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mean, variance)
        ctx.scalar, ctx.order = scalar, order
        fineness, estimate = _converged(scalar, mean, standard_deviation(variance), order)
        needed = torch.full_like(mean, fineness)
        ctx.mark_non_differentiable(needed)
        return estimate.mean, estimate.variance, estimate.coefficients, needed

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor, *grads: Tensor) -> Any:
        (mean, variance), order, grad_rows = ctx.saved_tensors, ctx.order, grads[0]
        stddev = standard_deviation(variance)
        _, at = _converged(ctx.scalar, mean, stddev, order + 2)
        step = _step(ctx.scalar, mean, stddev)
        rows = at.coefficients  # a_k / sigma
        if bool((step > stddev).any()):  # rounding would swamp second derivatives
            rows = _widened(ctx.scalar, mean, step, rows)
        into_mean = grad_mean * at.coefficients[0] + grad_variance * at.variance_by_mean
        into_variance = grad_mean * rows[1] / (math.sqrt(2) * step)
        into_variance = into_variance + grad_variance * at.variance_by_variance
        for k in range(1, order + 1):
            # d a_k / d mu = sqrt(k+1) a_{k+1} / sigma, and the heat equation for the variance.
            into_mean = into_mean + grad_rows[k - 1] * math.sqrt(k + 1) * rows[k] / step
            heat = (k - 1) * rows[k - 1] + math.sqrt((k + 1) * (k + 2)) * rows[k + 1]
            into_variance = into_variance + grad_rows[k - 1] * heat / (2 * step.square())
        return into_mean, into_variance, None, None


def _step(scalar: Scalar, mean: Tensor, stddev: Tensor) -> Tensor:
    """Widths at which slopes are compared: where rounding is small, and no kink is in reach."""
    near = [(mean - kink).abs() / REACH for kink in scalar.kinks]
    step = torch.stack([torch.full_like(mean, DIFFERENCE_STEP), *near]).amin(0).maximum(stddev)
    return torch.where(step > torch.finfo(step.dtype).tiny ** 0.25, step, DIFFERENCE_STEP)


def _widened(scalar: Scalar, mean: Tensor, stddev: Tensor, rows: Tensor) -> Tensor:
    """Coefficients for wider elements; as given for those that the width takes across a jump."""
    try:
        return _converged(scalar, mean, stddev, len(rows))[1].coefficients
    except QuadratureError:
        if len(mean) == 1:
            return rows
    middle = len(mean) // 2
    halves = [
        _widened(scalar.take(half), mean[half], stddev[half], rows[:, half])
        for half in (slice(middle), slice(middle, None))
    ]
    return torch.cat(halves, dim=-1)


class _Estimate(NamedTuple):
    """Moments of each element on one grid."""

    mean: Tensor
    variance: Tensor
    mismatch: Tensor
    """Distance of g from the integral of g', in standard deviations; rounding aside."""
    rounding: Tensor
    """The square of what rounding, of values and of arguments, does to a deviation; the smallest
    normal number at least, as denormal ones have few digits."""
    variance_by_mean: Tensor
    variance_by_variance: Tensor
    coefficients: Tensor

    def agrees_with(self, coarse: "_Estimate") -> bool:
        """Whether mean and variance have not moved, but for rounding."""
        variance, floor = self.variance, self.rounding
        drift = (variance - coarse.variance).abs()
        shift = (self.mean - coarse.mean).square()
        still = (drift <= CONVERGED * variance + floor) & (shift <= CONVERGED**2 * variance + floor)
        return bool(still.all())


def _estimate(
    scalar: Scalar, mean: Tensor, stddev: Tensor, panels: int, fineness: float, order: int
) -> _Estimate:
    """Moments by g and g' on panels around some elements, with the weights of the density."""
    points = breakpoints(scalar.kinks, mean, stddev, panels, fineness=fineness)
    grid = Panels(points, NODES)
    normal = grid.weights * density(grid.nodes)

    def expect(values: Tensor) -> Tensor:
        return (values * normal).sum((-2, -1))

    value, slope = value_and_slope(
        scalar, mean[..., None, None] + stddev[..., None, None] * grid.nodes
    )
    centre, varies = scalar(mean), stddev > 0
    rise = stddev[..., None, None] * grid.integral_from_zero(slope)  # g(y) - g(mu)
    expected = expect(rise)
    deviation = rise - expected[..., None, None]
    variance = expect(deviation.square())
    size = expect(value.square()) + (mean.abs() + stddev).square()
    floor = rounding(DEVIATION, size.dtype) ** 2 * size + torch.finfo(size.dtype).tiny

    def mismatch(level: Tensor) -> Tensor:
        excess = (expect((value - level[..., None, None] - rise).square()) - floor).clamp(min=0)
        return torch.where(excess > 0, excess / variance.where(variance > 0, excess), 0).sqrt()

    error = mismatch(centre)
    if bool((error > MISMATCH).any()):  # a value at the mean alone, as of the sign at zero?
        around = expect(value - rise) / normal.sum((-2, -1))
        continued = (error > MISMATCH) & (mismatch(around) <= MISMATCH)
        centre, error = torch.where(continued, around, centre), torch.where(continued, 0, error)
    # 2 Cov(g, g') and, for the variance, E[(g - E g) g' xi] / sigma with its limit g'^2.
    product = deviation * slope
    by_variance = expect(product * grid.nodes) / torch.where(varies, stddev, 1)
    return _Estimate(
        centre + expected,
        variance,
        error,
        floor,
        2 * expect(product),
        torch.where(varies, by_variance, expect(slope).square()),
        _coefficients(grid, slope, order),
    )


def _coefficients(grid: Panels, slope: Tensor, order: int) -> Tensor:
    if not order:
        return slope.new_empty(0, *slope.shape[:-2])
    if grid.nodes.dim() == 2:  # noqa: PLR2004  (panels, nodes), for all elements
        basis = hermite_basis(len(grid.nodes), order).to(slope)
        return (slope.flatten(-2) @ basis.mT).movedim(-1, 0)
    weighted = slope * grid.weights
    rows = zip(range(1, order + 1), hermite_functions(grid.nodes), strict=False)
    return torch.stack([(weighted * h).sum((-2, -1)) / math.sqrt(k) for k, h in rows])


def _on_grids(
    scalar: Scalar, mean: Tensor, stddev: Tensor, order: int, waves: int, fineness: float
) -> _Estimate:
    """Moments on grids of one fineness, narrow enough for He_waves, a bounded number at a time."""
    panels = int(panel_count(stddev, waves) * fineness)
    if scalar.compiled is not None and float(stddev.max()) <= WIDE and usable(mean, stddev):
        places = [float(kink) for kink in scalar.kinks]
        rule = Rule(panels, REACH, rounding(DEVIATION, mean.dtype), *legendre(NODES))
        shared = order > LOW_ORDER and not places and len(mean) * panels * NODES <= HELD_VALUES
        basis = hermite_basis(panels, order) if shared else None
        return _Estimate(
            *quadrature(scalar.compiled, places, mean, stddev, scalar(mean), order, rule, basis)
        )
    widest = stddev.argmax().reshape(1)
    kinks = scalar.take(widest).kinks
    nodes = breakpoints(kinks, mean[widest], stddev[widest], panels, fineness=fineness)
    size = max(1, HELD_VALUES // (NODES * nodes.shape[-1]))
    slices = [slice(start, start + size) for start in range(0, len(mean), size)]
    parts = [
        _estimate(scalar.take(part), mean[part], stddev[part], panels, fineness, order)
        for part in slices
    ]
    return _Estimate(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))


def _converged(scalar: Scalar, mean: Tensor, stddev: Tensor, order: int) -> tuple[int, _Estimate]:
    """The fineness at which mean and variance converge and g' integrates back to g; moments."""
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
            mismatch, converged = float(fine.mismatch.max()), fine.agrees_with(coarse)
            if converged and mismatch <= MISMATCH:
                return fineness, fine
            if converged and mismatch > before / 2:
                raise QuadratureError(
                    f"autograd's derivative of {name} does not integrate back to it: it jumps, or "
                    "defines a gradient of its own; a piecewise-linear function with jumps is a "
                    "covprop.activations.Piecewise"
                )
            coarse, fineness, before = fine, 2 * fineness, mismatch
    raise QuadratureError(
        f"the moments of {name} do not converge on ever finer grids; name all places where its "
        "derivative jumps with cp.activation(function, kinks=(...))"
    )


def _check_parameters(scalar: Scalar, mean: Tensor) -> None:
    """Quadrature gives gradients only by the argument."""
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
    together, single = scalar(mean)[-1:], scalar.take(slice(-1, None))(mean[-1:])
    if not bool(torch.isclose(single, together, rtol=MISMATCH, equal_nan=True).all()):
        raise QuadratureError(
            f"{name_of(scalar.function)} is not element-wise: an element's value depends on the "
            "others; write a rule for it with @cp.rule"
        )
