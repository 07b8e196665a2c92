"""Expected derivatives of a function and of its centred square and cube.

With f = g - E[g(y)], y ~ N(mu, sigma^2) and xi = (y - mu) / sigma,

    sigma^k E[(f^p)^(k)(y)] = E[f(y)^p He_k(xi)]

needs no derivative of g: it holds for kinks and jumps as well. Centring first leaves no difference
of large moments.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.base import Activation
from covprop.activations.moments import (
    HELD_VALUES,
    NODES,
    Scalar,
    breakpoints,
    panel_count,
    value_and_slope,
)
from covprop.errors import QuadratureError
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.kernels.polynomials import Panels, hermite_weights

CUBE_ORDER = 4
"""The highest derivative of the cube that fourth cumulants need."""


class ExpectedDerivatives(NamedTuple):
    """sigma^k E[(f^p)^(k)], k = 0 ... order, of f, its square and its cube; (order + 1, *batch, n).

    f is the function less its mean. Those of the cube end with k = 4.
    """

    first: Tensor
    second: Tensor
    third: Tensor

    def _orders(self) -> Tensor:
        """Variances of the orders 1, 2, ... of the function, f_k^2 / k!."""
        rows = self.first[1:]
        numbers = torch.arange(1.0, len(rows) + 1, dtype=rows.dtype, device=rows.device)
        return rows.square() / numbers.cumprod(0).reshape(-1, *(1,) * (rows.dim() - 1))

    def curved_share(self) -> Tensor:
        """The share of the variance of each element that is not linear."""
        orders = self._orders()
        total = orders.sum(0)
        return orders[1:].sum(0) / torch.where(total > 0, total, 1)

    def curvature(self) -> Tensor:
        """The share of the deviation of each element that is not linear, without gradient."""
        return self.curved_share().detach().sqrt()

    def nonlinear(self, dtype: torch.dtype) -> Tensor:
        """Whether the function of an element is not linear but for rounding, (*batch, n)."""
        orders = self._orders()
        largest = orders.sum(0).amax(-1, keepdim=True)
        return orders[1:].sum(0) > torch.finfo(dtype).eps ** 2 * largest


def expected_derivatives(
    activation: Activation, mean: Tensor, variance: Tensor, order: int
) -> ExpectedDerivatives:
    """Those of the function and of its powers; mean and variance (*batch, n) in float64."""
    _check_parameters(activation, mean, variance)
    first, second, third = _Integrals.apply(mean, variance, activation, order)
    if first.requires_grad:  # the integrals are centred on a constant, which gradients notice
        centre = activation.mean(mean, variance)
        shift = centre - centre.detach()
        third = third - 3 * shift * second[: CUBE_ORDER + 1]
        second = second - 2 * shift * first
        first = torch.cat([first[:1] - shift, first[1:]])
    return ExpectedDerivatives(first, second, third)


def _check_parameters(activation: Activation, mean: Tensor, variance: Tensor) -> None:
    """Integrals have gradients by mean and variance only."""
    if not torch.is_grad_enabled() or not mean.numel():
        return
    point = mean.detach().flatten()[:1]
    for factor, scalar in activation.scalars(mean.detach(), variance.detach()):
        first = scalar.having([tensor.flatten()[:1] for tensor in scalar.of_elements])
        if factor.requires_grad or first(point).requires_grad:
            raise QuadratureError(
                "third cumulants have no gradient by the parameters of an activation; detach them, "
                "or run under torch.no_grad()"
            )


class _Integrals(Function):
    """E[f^p He_k]; gradients by the same integrals of higher order."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, activation: Activation, order: int
    ) -> tuple[Tensor, ...]:
        followed = any(ctx.needs_input_grad)
        counts = [count + 2 * followed for count in (order + 1, order + 1, CUBE_ORDER + 1)]
        rows = activation.powers(mean.detach(), variance.detach(), counts)
        if rows is None:
            terms = activation.scalars(mean.detach(), variance.detach())
            rows = _integrals(mean.detach(), variance.detach(), terms, counts)
        ctx.save_for_backward(variance, *rows)
        return tuple(part[:-2] if followed else part for part in rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        variance, *rows = ctx.saved_tensors
        normal = variance >= torch.finfo(variance.dtype).tiny  # or gradients overflow
        inverse = inverse_deviation(torch.where(normal, variance, 0))
        into_mean, into_variance = torch.zeros_like(variance), torch.zeros_like(variance)
        for gradient, all_rows in zip(gradients, rows, strict=True):
            count = len(gradient)
            number = torch.arange(count, dtype=variance.dtype, device=variance.device)
            number = number.reshape(-1, *(1,) * variance.dim())
            heat = number * all_rows[:count] + all_rows[2 : count + 2]
            into_mean = into_mean + (gradient * all_rows[1 : count + 1]).sum(0) * inverse
            into_variance = into_variance + (gradient * heat).sum(0) * inverse.square() / 2
        return into_mean, into_variance, None, None


@torch.no_grad()
def _integrals(
    mean: Tensor, variance: Tensor, terms: list[tuple[Tensor, Scalar]], counts: list[int]
) -> list[Tensor]:
    """E[f^p He_k] for p = 1, 2, 3 and k below the count of each, some elements at a time."""
    shape, flat, stddev = mean.shape, mean.flatten(), standard_deviation(variance).flatten()
    if not len(flat):
        return [mean.new_zeros(count, *shape) for count in counts]
    flat_terms = [
        (factor.expand(shape).flatten(), scalar.having([t.flatten() for t in scalar.of_elements]))
        for factor, scalar in terms
    ]
    by_width = stddev.argsort(stable=True)  # elements of like width have like grids
    periodic = any(scalar.periodic for _, scalar in terms)
    grid = NODES * panel_count(stddev if periodic else stddev.new_ones(1), max(counts), periodic)
    size = max(1, HELD_VALUES // (max(counts) * grid))
    parts = []
    for part in by_width.split(size):
        some = [(factor[part], scalar.take(part)) for factor, scalar in flat_terms]
        parts.append(_of_elements(flat[part], stddev[part], some, counts))
    back = by_width.argsort()
    joined = (torch.cat(rows, dim=-1)[:, back] for rows in zip(*parts, strict=True))
    return [rows.reshape(len(rows), *shape) for rows in joined]


def _of_elements(
    mean: Tensor, stddev: Tensor, terms: list[tuple[Tensor, Scalar]], counts: list[int]
) -> tuple[Tensor, ...]:
    kinks = [kink for _, scalar in terms for kink in scalar.kinks]
    fineness = max(scalar.fineness for _, scalar in terms)
    periodic = any(scalar.periodic for _, scalar in terms)
    panels = panel_count(stddev, max(counts), periodic) * fineness
    grid = Panels(breakpoints(kinks, mean, stddev, panels, fineness=fineness), NODES)
    y = mean[:, None, None] + stddev[:, None, None] * grid.nodes
    value = torch.zeros_like(y)  # g(y) - g(mu), as the integral of g' and the jumps between them
    for factor, scalar in terms:
        slope = value_and_slope(scalar, y)[1]
        rise = stddev[:, None, None] * grid.integral_from_zero(slope)
        for place, height in scalar.jumps:
            rise = rise + height * ((y >= place).to(y) - (mean >= place).to(y)[:, None, None])
        value = value + factor[:, None, None] * rise
    # One matrix product for all orders; grids without kinks are the same for all elements.
    rows = hermite_weights(grid.nodes.flatten(-2), grid.weights.flatten(-2), max(counts)).mT
    value = value.flatten(-2)
    value = value - (value[:, None] @ rows[..., :1])[:, 0]
    powers = torch.stack([value, value.square(), value * value.square()], dim=-2)
    found = (powers @ rows).permute(1, 2, 0)
    return tuple(part[:count] for part, count in zip(found, counts, strict=True))
