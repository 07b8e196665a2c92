"""Each layer exactly, or to the accuracy of its quadrature, given that its input is Gaussian."""

from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.correlated import beyond_series, integrated
from covprop.covariance import Covariance, Dense
from covprop.covariance.base import Pairs
from covprop.flow.lineage import Replacements
from covprop.methods.comparison.independent_maxima import MaximaOption
from covprop.methods.series import series_cross


@final
@dataclass(frozen=True)
class GaussianLayers(MaximaOption):
    """Exact mean, variance and covariance of each layer, if its input is Gaussian.

    The output of an activation is not Gaussian. So networks with one layer of activations are
    exact, and deeper ones are as accurate as the inputs of their layers are Gaussian. `cp.Exact` is
    the same class.

    Args:
        activations: Replacements of registered activations, by torch function: an `Activation`, or
            a factory that takes the function's options.
        independent_maxima: Treat the arguments of a maximum as independent, as Gast & Roth (2018)
            do. This is for comparison (errors are in docs/operations.md).

    Example:
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        cp.propagate(torch.relu, x, cp.GaussianLayers())
    """

    compiled_gradients: ClassVar[bool] = True

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = False

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Closed forms, one-dimensional integrals and series whose bound is at rounding."""
        return exact_moments(activation, mean, covariance)

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """By the pair function that both share; or by a series, and integrals where it is long."""
        return exact_cross(left, right, covariance)


Exact = GaussianLayers
"""The former name of `GaussianLayers`, and still the same class."""


def exact_moments(
    activation: Activation, mean: Tensor, covariance: Covariance
) -> tuple[Tensor, Covariance]:
    """Mean (*batch, n) and covariance of an activation of a Gaussian vector."""

    def by_torch(mean: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        result, made = _exact_moments(activation, mean, Dense(matrix))
        return result, made.matrix()

    whole = covariance.of_matrix(lambda matrix: activation.of_matrix(mean, matrix, by_torch))
    return _exact_moments(activation, mean, covariance) if whole is None else whole


def _exact_moments(
    activation: Activation, mean: Tensor, covariance: Covariance
) -> tuple[Tensor, Covariance]:
    """The same, step by step."""
    variance = covariance.diagonal().double()
    point = mean.double()
    if covariance.independent:
        result, output = activation.marginals(point, variance)
        return result.to(mean.dtype), covariance.pairwise(activation.pair, (), output)
    order = 0
    if activation.uses_series(covariance.size * variance.numel(), point, variance):
        largest = 1.0
        if not covariance.deferred:  # which would have to be computed for it
            largest = covariance.largest_correlation()
        order = activation.order(largest, mean.dtype)
    prepared = activation.prepare(point, variance, order, mean.dtype)
    pairs = Pairs(activation.pair, activation.pair_matrix)
    made = covariance.pairwise(pairs, prepared.elements, prepared.variance)
    return prepared.mean.to(mean.dtype), made


def exact_cross(left: Activated, right: Activated, covariance: Tensor) -> Tensor:
    """Cov(g(y_i), h(w_j)) of jointly Gaussian vectors, given Cov(y_i, w_j)."""
    first, second = left.activation, right.activation
    if type(first) is not type(second) or first.key != second.key:
        order, pairs = beyond_series(left, right, covariance)
        result = series_cross(left, right, covariance, order)
        if not len(pairs[0]):
            return result
        found = integrated(left, right, covariance, pairs)
        return result.index_put(pairs, found.to(result.dtype))
    rows = tuple(t[..., :, None] for t in left.elements(covariance.dtype))
    columns = tuple(t[..., None, :] for t in right.elements(covariance.dtype))
    return first.pair(rows, columns, covariance)
