"""What a method of propagation is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.covariance import Covariance, Diagonal
from covprop.gaussian import Gaussian
from covprop.methods.network import Network
from covprop.sampling import SamplingError

Replacements: TypeAlias = Mapping[Callable[..., Any], Activation | Callable[..., Activation]]

Advance: TypeAlias = Callable[[int, int], None]
"""Told how many more, and of how many, evaluations of the model are done."""

Estimate: TypeAlias = tuple[Tensor, Tensor, SamplingError | None]
"""Mean (*batch, m) and covariance (*batch, m, m) of an output, and how far they may be off."""


class LayerwiseMethod(ABC):
    """A method that goes through the network once and treats each nonlinearity in its own way."""

    activations: Replacements
    """Activations to use in place of the declared ones, by torch function."""
    independent_maxima: bool
    """Whether maxima take their arguments as independent, whatever is known of them."""

    variances_only: ClassVar[bool] = False
    """Whether all that arises between features is left out."""

    returns: ClassVar[bool] = False
    """Whether the way is gone back from the outputs, so that all of it is kept."""

    @property
    def remembers(self) -> bool:
        """Whether what goes into a nonlinearity is kept for the way back."""
        return self.returns

    @property
    def first_order(self) -> bool:
        """Whether the covariances of activations with others end with the first order."""
        return False

    def begun(self) -> "LayerwiseMethod":
        """The method of one propagation: itself, or a copy with what that has to remember."""
        return self

    def begin(self, covariance: Covariance) -> Covariance:
        """The covariance of an input, in the structure that the method wants."""
        if self.variances_only:
            return Diagonal(covariance.diagonal(), assumed=True)
        return Diagonal(covariance.values) if isinstance(covariance, Diagonal) else covariance

    def columns(self, covariance: Covariance) -> int:
        """How many numbers for each feature take the place of its covariances, 0 if none."""
        del covariance
        return 0

    @abstractmethod
    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Mean (*batch, n) and covariance of an element-wise function."""

    @abstractmethod
    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """Covariance of two activations of different tensors, given that of the tensors."""


class FunctionMethod(ABC):
    """A method that evaluates the network on plain tensors, whatever operations it is made of."""

    random: ClassVar[bool] = False
    """Whether a network that draws random numbers is evaluated often enough to average them."""

    @abstractmethod
    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Bytes held at a time for each entry of the covariance of an output of this dtype."""

    @abstractmethod
    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Mean and covariance of every output of the network."""


class Propagation(ABC):
    """A network and what it is called with, to be run with other Gaussians and other methods."""

    inputs: tuple[Gaussian, ...]
    """The Gaussians among what it is called with."""

    @abstractmethod
    def run(self, inputs: Sequence[Gaussian], method: "Method") -> Any:
        """What the network returns for these in place of its own."""

    @abstractmethod
    def network(self) -> Network:
        """The network as a function of plain tensors."""

    @abstractmethod
    def nest(self, network: Network, estimates: Sequence[Estimate], method: "Method") -> Any:
        """What the network returns, with a Gaussian for each estimate of its outputs."""

    @abstractmethod
    def gains(self, method: "Method", wanted: bool = False) -> dict[int, list[Tensor]]:
        """E[J] L for each output, by its place among all results, and each input: (*batch, m, n).

        wanted: only of those elements of the outputs that the method is asked for.

        J is the Jacobian, L L^T the covariance of the input. Methods that go through the network
        know its expectation (Stein: Cov(y, x) = E[J] S); of others it is taken at the mean.
        """


class WrappingMethod(ABC):
    """A method that has another one do the work, on other inputs or beside samples."""

    base: "Method"

    @abstractmethod
    def around(self, propagation: Propagation, advance: Advance) -> Any:
        """What the network returns, with a Gaussian in place of each output."""


Method: TypeAlias = LayerwiseMethod | FunctionMethod | WrappingMethod
"""A way to find the mean and the covariance of a network's output."""
