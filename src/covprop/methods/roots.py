"""Square roots of the covariances of inputs, in their structure."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance import Diagonal, LowRank, Zero
from covprop.covariance.dense import square_root
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation


@final
@dataclass(frozen=True)
class Root:
    """L with L L^T the covariance of x: deviations (*batch, n) if alone, else (*batch, n, width).

    beside: deviations (*batch, n) of independent noise, whose columns follow those of the values.
    """

    x: Gaussian
    values: Tensor
    alone: bool
    beside: Tensor | None = None

    @classmethod
    def of(cls, x: Gaussian) -> "Root":
        """Independent features are never written out as a matrix."""
        if isinstance(x.covariance, Diagonal | Zero):
            return cls(x, standard_deviation(x.covariance.values), alone=True)
        if isinstance(x.covariance, LowRank):
            alone = x.covariance.values
            beside = None if alone is None else standard_deviation(alone)
            return cls(x, x.covariance.factor, alone=False, beside=beside)
        return cls(x, square_root(x.covariance.matrix()), alone=False)

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.values.shape[-1] + (0 if self.beside is None else self.beside.shape[-1])

    def times(self, numbers: Tensor) -> Tensor:
        """L z for numbers (count, *batch, width), in the shape (count, *batch, *event)."""
        if self.alone:
            noise = numbers * self.values
        else:
            first = numbers[..., : self.values.shape[-1]]
            noise = (first.movedim(0, -2) @ self.values.mT).movedim(-2, 0)
        if self.beside is not None:
            noise = noise + numbers[..., self.values.shape[-1] :] * self.beside
        return noise.reshape(len(numbers), *self.x.mean.shape)

    def after(self, jacobian: Tensor) -> Tensor:
        """J L for a Jacobian (*batch, m, n)."""
        if self.alone:
            return jacobian * self.values[..., None, :]
        first = jacobian @ self.values
        if self.beside is None:
            return first
        return torch.cat([first, jacobian * self.beside[..., None, :]], dim=-1)

    def whitened(self, cross: Tensor) -> Tensor:
        """C L^-T for the covariances C (*batch, m, n) of something with x.

        Where L is singular, that of least norm: C has nothing in those directions.
        """
        if self.alone:
            return cross * inverse_deviation(self.values.square())[..., None, :]
        if isinstance(self.x.covariance, LowRank):  # whose root is not square
            eye = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
            return cross @ torch.linalg.pinv(self.after(eye)).mT
        return _solved(self.values, cross.mT).mT

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L as (count, *batch, *event)."""
        if self.alone:
            columns = _of_diagonal(self.values, start, stop)
        else:
            columns = self.values[..., start:stop]
            first = self.values.shape[-1]
            if self.beside is not None and stop > first:
                others = _of_diagonal(self.beside, max(start, first) - first, stop - first)
                columns = torch.cat([columns, others], dim=-1)
        return columns.movedim(-1, 0).reshape(stop - start, *self.x.mean.shape)


def _of_diagonal(values: Tensor, start: int, stop: int) -> Tensor:
    """Columns [start, stop) of a diagonal matrix, (*batch, n, count)."""
    block = torch.diag_embed(values[..., start:stop])
    return torch.nn.functional.pad(block, (0, 0, start, values.shape[-1] - stop))


def _solved(root: Tensor, right: Tensor) -> Tensor:
    """L^+ B for a root of `square_root`, which is triangular or has orthogonal columns."""
    pivots = root.diagonal(dim1=-2, dim2=-1)
    triangular = (root.triu(1) == 0).all(-1).all(-1) & (pivots != 0).all(-1)
    triangular = triangular[..., None, None]
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    first = torch.linalg.solve_triangular(
        torch.where(triangular, root, identity), right, upper=False
    )
    if bool(triangular.all()):
        return first
    lengths = inverse_deviation(root.square().sum(-2))
    return torch.where(triangular, first, lengths.square()[..., None] * (root.mT @ right))
