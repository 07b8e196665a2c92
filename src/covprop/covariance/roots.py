"""Square roots of covariances, each as its structure has it: L with L L^T = S."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.kernels.normal import standard_deviation


def square_root(matrix: Tensor) -> Tensor:
    """L with L L^T = S: the Cholesky factor, or scaled eigenvectors where S is singular."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    # Each element of a batch on its own, and without the gradient of a factor that failed.
    flat, singular = matrix.reshape(-1, *matrix.shape[-2:]), failed.reshape(-1) > 0
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(torch.where(singular[:, None, None], identity, flat))
    eigenvalues, eigenvectors = torch.linalg.eigh(flat[singular])
    scaled = eigenvectors * standard_deviation(eigenvalues)[..., None, :]
    still = flat[singular].diagonal(dim1=-2, dim2=-1) == 0  # where roundings would be noise
    scaled = torch.where(still[..., None], 0, scaled)
    return factor.index_put((singular,), scaled).reshape(matrix.shape)


class Root(ABC):
    """L (*batch, n, width)."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns."""

    @abstractmethod
    def times(self, numbers: Tensor) -> Tensor:
        """L z (count, *batch, n) of numbers (count, *batch, width)."""

    @abstractmethod
    def after(self, rows: Tensor) -> Tensor:
        """A L (*batch, m, width) of rows A (*batch, m, n)."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L, (*batch, n, count)."""


@final
@dataclass(frozen=True)
class Deviations(Root):
    """Of independent features: values (*batch, n)."""

    values: Tensor

    @property
    def width(self) -> int:
        """One column for each feature."""
        return self.values.shape[-1]

    def times(self, numbers: Tensor) -> Tensor:
        """s_i z_i."""
        return numbers * self.values

    def after(self, rows: Tensor) -> Tensor:
        """A_pi s_i."""
        return rows * self.values[..., None, :]

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns of a diagonal matrix."""
        block = torch.diag_embed(self.values[..., start:stop])
        return pad(block, (0, 0, start, self.width - stop))


@final
@dataclass(frozen=True)
class Factor(Root):
    """Columns that are written out: values (*batch, n, k)."""

    values: Tensor

    @property
    def width(self) -> int:
        """The number of columns k."""
        return self.values.shape[-1]

    def times(self, numbers: Tensor) -> Tensor:
        """F z, samples as rows: broadcast as vectors, each would get a copy of F."""
        return (numbers.movedim(0, -2) @ self.values.mT).movedim(-2, 0)

    def after(self, rows: Tensor) -> Tensor:
        """A F."""
        return rows @ self.values

    def columns(self, start: int, stop: int) -> Tensor:
        """Some of the columns."""
        return self.values[..., start:stop]


@final
@dataclass(frozen=True)
class Beside(Root):
    """Of two independent noises: the columns of the second follow those of the first."""

    first: Root
    second: Root

    @property
    def width(self) -> int:
        """The columns of both."""
        return self.first.width + self.second.width

    def times(self, numbers: Tensor) -> Tensor:
        """L z + L' z'."""
        ours, others = numbers.split([self.first.width, self.second.width], dim=-1)
        return self.first.times(ours) + self.second.times(others)

    def after(self, rows: Tensor) -> Tensor:
        """[A L, A L']."""
        return torch.cat([self.first.after(rows), self.second.after(rows)], dim=-1)

    def columns(self, start: int, stop: int) -> Tensor:
        """Those of the first, then those of the second."""
        end = self.first.width
        parts = []
        if start < end:
            parts.append(self.first.columns(start, min(stop, end)))
        if stop > end:
            parts.append(self.second.columns(max(start, end) - end, stop - end))
        return torch.cat(parts, dim=-1)
