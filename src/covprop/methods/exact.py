"""Every nonlinearity to rounding, or to the accuracy of its quadrature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from covprop.activations import Activation
from covprop.covariance import Covariance
from covprop.methods.base import LayerwiseMethod


@final
@dataclass(frozen=True)
class Exact(LayerwiseMethod):
    """Exact mean, variance and covariance of each nonlinearity, given that its input is Gaussian.

    activations: replacements for declared activations, by torch function.
    """

    activations: Mapping[Callable[..., Any], Callable[..., Activation]] = field(
        default_factory=dict
    )

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Closed forms, one-dimensional integrals and series whose bound is at rounding."""
        variance = covariance.diagonal().double()
        point = mean.double()
        result = activation.mean(point, variance).to(mean.dtype)
        elements = activation.elements(point, variance)
        output = activation.variance(point, variance)
        return result, covariance.pairwise(activation.pair, elements, output)
