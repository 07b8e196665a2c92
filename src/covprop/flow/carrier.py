"""What an in-flight tensor carries beside its mean: the algebra that rules are written in.

A rule states mathematics once (this is linear, this is a product); a carrier knows what that does
to it. No rule asks which carrier it has. Carriers are joined by edges: an edge takes Cov(parent, w)
(*batch, n, m) to its share of Cov(child, w), its transpose takes rows, seen from the child, to rows
seen from the parent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, final

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.covariance import Covariance, LinearMap
from covprop.flow.algebra import Contraction, Groups, Recurrence
from covprop.flow.lineage import Node, Transfer

Term: TypeAlias = tuple["Carrier", LinearMap | float]
"""A term of a sum: a random vector, and the linear map or the number that it is multiplied with."""


class Moments(NamedTuple):
    """The moments of a nonlinear function of groups of elements, and the carrier of its result.

    extra: the part of the variance that is not linear in the input.
    """

    mean: Tensor
    carrier: "Carrier"
    extra: Tensor
    variance: Tensor


class RandomLinear(Protocol):
    """A linear map with random weights that are independent of everything else."""

    @property
    def shared(self) -> bool:
        """Whether a weight meets inputs of several positions."""

    def mean_map(self) -> LinearMap:
        """The map with the mean weights."""

    def independent_noise(self, second_moment: Tensor) -> Tensor:
        """Variances (*batch, m) that the weights add, given E[x^2] (*batch, n)."""

    def shared_noise(self, mean: Tensor, covariance: Covariance) -> Tensor:
        """Covariances (*batch, m, m) that the weights add where positions share them."""

    def congruence(self, covariance: Covariance) -> Tensor | None:
        """E[W] S E[W]^T, where there is a shorter way than through the matrix of S."""


class Carrier(Node, ABC):
    """The random part of an in-flight tensor: a vector of mean zero, as far as its kind knows it.

    Tensors that differ by a constant, or in shape, share one. Every operation gives a new carrier,
    whose edges lead to those that it came from, each with the expected linearisation of the
    operation. `loc` is the mean of the result, of which size and dtype count; `mean` is that of
    this vector, flat.

    Args:
        lineage: The propagation that it belongs to.
        edges: The carriers that it came from, each with its transfer.
        nonlinear: Whether the operation that made it is.
        opaque: Whether it does not say how it depends on what it came from.

    Example:
        @cp.rule(torch.deg2rad)
        def deg2rad(function, x):
            loc, factor = function(x.loc), function(torch.ones_like(x.flat))
            return cp.extending.GaussianTensor(loc, x.carrier.scale(loc, factor))

        cp.propagate(torch.deg2rad, x, cp.GaussianLayers())
    """

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of elements n."""

    @property
    @abstractmethod
    def covariance(self) -> Covariance:
        """The covariance of all elements, where the carrier has one."""

    @abstractmethod
    def variances(self) -> Tensor:
        """Variances (*batch, n)."""

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows it."""
        return self.variances().requires_grad

    def skewness(self) -> Tensor | None:
        """Normalised third central moments (*batch, n), None where they are not known."""
        return None

    @abstractmethod
    def cross(self, other: "Carrier") -> Tensor | None:
        """Cov(this, other) as (*batch, n, m), None if they are independent."""

    def expected_jvp(self, source: Self, columns: Tensor) -> Tensor | None:
        """E[J] B for columns B (*batch, n, m), J from an input to this, None if it is zero."""
        del source, columns
        raise NotImplementedError

    @abstractmethod
    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> "Carrier":
        """A result whose covariance is given; without a transfer it cannot meet other tensors."""

    @abstractmethod
    def linear(self, loc: Tensor, linear: LinearMap) -> "Carrier":
        """A x."""

    @abstractmethod
    def select(self, loc: Tensor, index: Tensor) -> "Carrier":
        """x[index], for an index (m,) that may repeat and leave out."""

    @abstractmethod
    def scale(self, loc: Tensor, factor: Tensor) -> "Carrier":
        """factor * x, factor (*batch, n)."""

    @abstractmethod
    def map(self, loc: Tensor, function: Callable[[Tensor], Tensor]) -> "Carrier":
        """The same numbers in another dtype, on another device or without gradients."""

    @abstractmethod
    def sum(self, loc: Tensor, terms: Sequence[Term], operation: Callable[..., Any]) -> "Carrier":
        """sum_i A_i x_i over distinct vectors of this kind; also concatenation."""

    @abstractmethod
    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Carrier"]:
        """Mean (*batch, *event) and carrier of a contraction of two; means (*batch, *shape)."""

    @abstractmethod
    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Carrier"]:
        """Mean (*batch, n) and carrier of an element-wise function."""

    def maximum(
        self, pair: Callable[[], tuple[Self, Self, Tensor, Tensor]]
    ) -> tuple[Tensor, "Carrier"] | None:
        """Mean and carrier of max(x, y), None to take it as x + relu(y - x).

        pair: gives x and y, broadcast to one shape, and their means (*batch, n).
        """
        del pair
        return None

    def monotone_maximum(self, inside: Callable[[], Any], outside: Callable[[], Any]) -> Any:
        """max g(y) of a nondecreasing g: inside() is g(max y), outside() the maximum of g(y)."""
        del outside
        return inside()

    def recurrent(self, mean: Tensor, recurrence: Recurrence) -> tuple[Tensor, "Carrier"] | None:
        """Outputs of all steps and the rest of the last state, None to take the steps one by one.

        mean (*batch, N, any), or (*batch, any) of one sequence each: the result is alike.
        """
        del mean, recurrence
        return None

    @abstractmethod
    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows u, v (k, *batch, n), at most `count` at a time, with sum u v^T the covariance."""

    @abstractmethod
    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """weight * z / sqrt(|z|^2 + offset) of every group z; the mean is without the weight."""

    @abstractmethod
    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """factor * |z| of every group z; mean (*batch, G)."""

    @abstractmethod
    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Carrier":
        """Cov + ratio (Cov + mean mean^T) within groups that share a mask, elements if None."""

    @abstractmethod
    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> "Carrier":
        """W x + b with random weights."""

    @abstractmethod
    def finish(self, loc: Tensor) -> Covariance:
        """The covariance of a result of the network."""

    @classmethod
    def collect(cls, held: set["Carrier"], others: Iterable["Carrier"]) -> None:
        """Release covariances that are not needed; held: the carriers of all living tensors."""
        del held, others


@final
@dataclass(frozen=True)
class LinearTransfer:
    """A linear map of the event."""

    linear: LinearMap

    def __call__(self, cross: Tensor) -> Tensor:
        """A C."""
        return self.linear.without_buffers()(cross.mT).mT

    def transposed(self, rows: Tensor) -> Tensor | None:
        """Rows (*batch, p, m) times A, if its layer has a short way to it."""
        layer = self.linear.layer
        return None if layer is None else layer.transposed(rows)


@final
@dataclass(frozen=True)
class DiagonalTransfer:
    """A number for each element, (*batch, n)."""

    factor: Tensor

    def __call__(self, cross: Tensor) -> Tensor:
        """diag(f) C."""
        return self.factor.to(cross.dtype)[..., None] * cross

    def transposed(self, rows: Tensor) -> Tensor:
        """Rows times diag(f)."""
        return rows * self.factor.to(rows.dtype)[..., None, :]


@final
@dataclass(frozen=True)
class ScalarTransfer:
    """One number for all elements."""

    weight: float

    def __call__(self, cross: Tensor) -> Tensor:
        """A multiple."""
        return cross if self.weight == 1 else self.weight * cross

    def transposed(self, rows: Tensor) -> Tensor:
        """The same multiple."""
        return rows if self.weight == 1 else self.weight * rows


@final
@dataclass(frozen=True)
class IndexTransfer:
    """Elements of an index (m,), of so many."""

    index: Tensor
    size: int

    def __call__(self, cross: Tensor) -> Tensor:
        """Rows of the index."""
        return cross.index_select(-2, self.index)

    def transposed(self, rows: Tensor) -> Tensor:
        """Each back to where it was taken from."""
        result = rows.new_zeros(*rows.shape[:-1], self.size)
        return result.index_add_(-1, self.index, rows)


@final
@dataclass(frozen=True)
class LazyTransfer:
    """A linear map that is built when it is needed."""

    make: Callable[[], LinearMap]

    def __call__(self, cross: Tensor) -> Tensor:
        """A C."""
        return self.make()(cross.mT).mT


def transfer_of(part: LinearMap | float) -> LinearTransfer | ScalarTransfer:
    """The transfer of a term of a sum."""
    return (
        LinearTransfer(part.without_buffers())
        if isinstance(part, LinearMap)
        else ScalarTransfer(part)
    )


def pushed_matrix(part: LinearMap | float, covariance: Covariance) -> Tensor:
    """The covariance matrix of a term of a sum."""
    if isinstance(part, LinearMap):
        return covariance.push(part).matrix()
    return covariance.matrix() if part**2 == 1 else part**2 * covariance.matrix()
