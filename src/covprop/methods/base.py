"""What a method of propagation is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.covariance import Covariance, Diagonal

Replacements: TypeAlias = Mapping[Callable[..., Any], Activation | Callable[..., Activation]]


class LayerwiseMethod(ABC):
    """A method that goes through the network once and treats each nonlinearity in its own way."""

    activations: Replacements
    """Activations to use in place of the declared ones, by torch function."""
    independent_maxima: bool
    """Whether maxima take their arguments as independent, whatever is known of them."""

    variances_only: ClassVar[bool] = False
    """Whether all that arises between features is left out."""

    def begin(self, covariance: Covariance) -> Covariance:
        """The covariance of an input, in the structure that the method wants."""
        if self.variances_only:
            return Diagonal(covariance.diagonal(), assumed=True)
        return Diagonal(covariance.values) if isinstance(covariance, Diagonal) else covariance

    @abstractmethod
    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Mean (*batch, n) and covariance of an element-wise function."""

    @abstractmethod
    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """Covariance of two activations of different tensors, given that of the tensors."""
