"""The closed forms of deterministic variational inference, for comparison."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import final

from torch import Tensor

from covprop.activations import Activated, Activation, Piecewise
from covprop.activations.base import Elements
from covprop.covariance import Covariance
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import correlation
from covprop.kernels.wu2019 import bump_first, bump_second
from covprop.methods.base import LayerwiseMethod, Replacements

Bump = Callable[[Tensor, Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True)
class Wu2019(LayerwiseMethod):
    """Wu et al. (2019): closed approximations of the covariances of ReLUs, and of steps.

    Exact means and variances; exact covariances where both means are zero, elsewhere a Gaussian
    bump of the means in place of the integral (1.3e-4 off at most for ReLUs of unit variance and
    correlation 0.5). The matrix need not be positive semi-definite. Other activations are refused.

    activations: what to use in place of declared activations, by torch function: an
    `Activation`, or a factory that takes the function's options;
    independent_maxima: take the arguments of a maximum as independent.
    """

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = False

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Exact moments of each element, their approximation of each pair."""
        pair = _pair_of(activation)
        point, variance = mean.double(), covariance.diagonal().double()
        if covariance.independent:
            centre, output = activation.marginals(point, variance)
            return centre.to(mean.dtype), covariance.pairwise(pair, (), output)
        elements = activation.elements(point, variance)
        result = covariance.pairwise(pair, elements, activation.variance(point, variance))
        return activation.mean(point, variance).to(mean.dtype), result

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """The same formula for two ReLUs, or two steps, of different tensors."""
        pair, other = _pair_of(left.activation), _pair_of(right.activation)
        if pair.args != other.args:
            raise UnsupportedOperation(
                "Wu et al. (2019) have no formula for the covariance of a ReLU and a step, which "
                "meet here; use cp.Exact()"
            )

        def elements(side: Activated) -> Elements:
            own = side.activation.elements(side.mean, side.variance)
            return tuple(element.to(covariance) for element in own)

        rows = tuple(element[..., :, None] for element in elements(left))
        columns = tuple(element[..., None, :] for element in elements(right))
        return pair(rows, columns, covariance)


def _pair_of(activation: Activation) -> partial[Tensor]:
    """Their formula for an activation, where there is one."""
    if isinstance(activation, Piecewise) and list(activation.knots) == [0.0]:
        slopes = [s if isinstance(s, float | int) else None for s in activation.slopes]
        shape = slopes, list(activation.jumps), activation.start
        if shape == ([0.0, 1.0], [0.0], 0.0):
            return partial(_pair, bump_second)
        if shape == ([0.0, 0.0], [1.0], 0.0):
            return partial(_pair, bump_first)
    raise UnsupportedOperation(
        "Wu et al. (2019) have formulas for ReLU and Heaviside alone; use cp.Exact() or cp.Series()"
    )


def _pair(bump: Bump, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
    """Of c, 1 / sigma, E[g'], (phi), a and the height sigma: c E[g'] E[g'] + bump of (a, b, rho).

    A step has no slope and the height one.
    """
    inverse_i, slope_i, _, (a,), (height_i,) = left[:5]
    inverse_j, slope_j, _, (b,), (height_j,) = right[:5]
    rho = correlation(covariance, inverse_i, inverse_j)
    if bump is bump_first:
        return bump(a, b, rho)
    return covariance * (slope_i * slope_j) + height_i * height_j * bump(a, b, rho)
