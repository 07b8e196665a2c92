"""What a method of propagation is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from covprop.activations import Activation
from covprop.covariance import Covariance


class LayerwiseMethod(ABC):
    """A method that goes through the network once and treats each nonlinearity in its own way."""

    activations: Mapping[Callable[..., Any], Callable[..., Activation]]
    """Activations to use in place of the declared ones, by torch function."""

    @abstractmethod
    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Mean (*batch, n) and covariance of an element-wise function."""
