"""Square roots of the covariances of inputs, in their structure."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance import Diagonal, Zero
from covprop.covariance.dense import square_root
from covprop.gaussian import Gaussian
from covprop.kernels.normal import standard_deviation


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

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L as (count, *batch, *event)."""
        if self.alone:
            block = torch.diag_embed(self.values[..., start:stop])
            size = self.values.shape[-1]
            columns = torch.nn.functional.pad(block, (0, 0, start, size - stop))
        else:
            columns = self.values[..., start:stop]
        return columns.movedim(-1, 0).reshape(stop - start, *self.x.mean.shape)
