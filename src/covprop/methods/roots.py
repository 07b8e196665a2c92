"""Square roots of the covariances of inputs, in their structure."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance import Diagonal, Zero
from covprop.covariance.dense import square_root
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation


@final
@dataclass(frozen=True)
class Root:
    """L with L L^T the covariance of x: deviations (*batch, n) if alone, else (*batch, n, n)."""

    x: Gaussian
    values: Tensor
    alone: bool

    @classmethod
    def of(cls, x: Gaussian) -> "Root":
        """Independent features are never written out as a matrix."""
        if isinstance(x.covariance, Diagonal | Zero):
            return cls(x, standard_deviation(x.covariance.values), alone=True)
        return cls(x, square_root(x.covariance.matrix()), alone=False)

    def times(self, numbers: Tensor) -> Tensor:
        """L z for numbers (count, *batch, n), in the shape (count, *batch, *event)."""
        if self.alone:
            noise = numbers * self.values
        else:
            noise = (numbers.movedim(0, -2) @ self.values.mT).movedim(-2, 0)
        return noise.reshape(len(numbers), *self.x.mean.shape)

    def after(self, jacobian: Tensor) -> Tensor:
        """J L for a Jacobian (*batch, m, n)."""
        return jacobian * self.values[..., None, :] if self.alone else jacobian @ self.values

    def whitened(self, cross: Tensor) -> Tensor:
        """C L^-T for the covariances C (*batch, m, n) of something with x.

        Where L is singular, that of least norm: C has nothing in those directions.
        """
        if self.alone:
            return cross * inverse_deviation(self.values.square())[..., None, :]
        return _solved(self.values, cross.mT).mT

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L as (count, *batch, *event)."""
        if self.alone:
            block = torch.diag_embed(self.values[..., start:stop])
            size = self.values.shape[-1]
            columns = torch.nn.functional.pad(block, (0, 0, start, size - stop))
        else:
            columns = self.values[..., start:stop]
        return columns.movedim(-1, 0).reshape(stop - start, *self.x.mean.shape)


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
