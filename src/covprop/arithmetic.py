"""Sums, products and matrix products of a Gaussian with constants."""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap
from covprop.distribution import Distribution
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import inverse_deviation

MATRIX = 2


class Arithmetic(Distribution):
    """`x + c`, `x - c`, `c - x`, `-x`, `x * c` and `x / c` for numbers, or tensors like the mean.

    The skewness stays, up to its sign. An estimated error, standard errors and a mixture are
    dropped, as they describe the original Gaussian.
    """

    __slots__ = ()
    __array_ufunc__ = None  # numpy leaves its operators to ours

    @abstractmethod
    def with_moments(
        self,
        mean: Tensor | None = None,
        covariance: Covariance | None = None,
        skewness: Tensor | None = None,
    ) -> Self:
        """The same with other moments, unchecked."""

    def __add__(self, other: float | Tensor) -> Self:
        return self.with_moments(mean=self.mean + self._constant(other, "+"))

    def __mul__(self, other: float | Tensor) -> Self:
        factor = self._constant(other, "*").expand(self.mean.shape)
        flat = factor.reshape(*self.batch_shape, self.event_shape.numel())
        skewness = None if self.skewness is None else self.skewness * factor.sign()
        return self.with_moments(self.mean * factor, self.covariance.scale(flat), skewness)

    def __radd__(self, other: float | Tensor) -> Self:
        return self + other

    def __rmul__(self, other: float | Tensor) -> Self:
        return self * other

    def __neg__(self) -> Self:
        return self * -1.0

    def __sub__(self, other: float | Tensor) -> Self:
        return self + -self._constant(other, "-")

    def __rsub__(self, other: float | Tensor) -> Self:
        return -self + other

    def __truediv__(self, other: float | Tensor) -> Self:
        return self * (1 / self._constant(other, "/"))

    def _constant(self, other: Any, sign: str) -> Tensor:
        """A number or a tensor that broadcasts to the mean, in its dtype."""
        constant = as_constant(other, sign, self.mean)
        try:
            fits = torch.broadcast_shapes(constant.shape, self.mean.shape) == self.mean.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise InvalidGaussian(
                f"a constant of shape {tuple(constant.shape)} does not broadcast to the mean, of "
                f"shape {tuple(self.mean.shape)}; expand the Gaussian's mean and covariance first"
            )
        return constant


def as_constant(other: Any, sign: str, like: Tensor) -> Tensor:
    """The other side of an operator, as a tensor of the same kind."""
    if isinstance(other, Distribution):
        raise TypeError(
            f"{sign} takes a constant, because two Gaussians may depend on each other; for "
            f"independent ones use cp.propagate(lambda a, b: a {sign} b, first, second)"
        )
    if not isinstance(other, Tensor | int | float):
        raise TypeError(f"{sign} takes a number or a tensor, not {type(other).__name__}")
    return torch.as_tensor(other, dtype=like.dtype, device=like.device)


def matrix_product(other: Any, x: Distribution, left: bool) -> LinearMap:
    """The map of events of x to `other @ event`, or to `event @ other`."""
    matrix, event = as_constant(other, "@", x.mean), x.event_shape
    size = event[-1] if not left or len(event) == 1 else event[-2] if event else None
    inner = matrix.shape[-1 if left else 0] if matrix.dim() else None
    if matrix.dim() not in (1, MATRIX) or not event or inner != size:
        sides = (tuple(matrix.shape), tuple(event))
        raise InvalidGaussian(
            "@ takes a matrix or a vector and a Gaussian whose event has as many elements, not "
            f"{' @ '.join(map(str, sides if left else sides[::-1]))} (matrix and event)"
        )
    if left and len(event) > 1:
        return LinearMap(lambda events: torch.matmul(matrix, events), event, leading=True)
    if left:  # of vectors, which are rows here
        matrix = matrix.mT if matrix.dim() == MATRIX else matrix
    return LinearMap(lambda events: torch.matmul(events, matrix), event, leading=True)


def mapped_skewness(linear: LinearMap, x: Distribution, variance: Tensor) -> Tensor:
    """The skewness (*batch, m) of a linear map of independent elements, whose cumulants add.

    variance: of the result, (*batch, m).
    """
    assert x.skewness is not None
    third = (x.skewness.double() * x.stddev.double() ** 3).reshape(*x.batch_shape, -1)
    size = third.shape[-1]
    identity = torch.eye(size, dtype=x.dtype, device=x.device).expand(*x.batch_shape, size, size)
    cubes = linear(identity).double() ** 3  # (*batch, n, m)
    total = (third[..., None, :] @ cubes)[..., 0, :]
    return (total * inverse_deviation(variance.double()) ** 3).to(x.dtype)
