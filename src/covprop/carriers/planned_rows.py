"""What a plan counts of carriers without covariances: so many numbers for each feature."""

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from covprop.covariance.planned import Cost, PlannedCovariance, Result


@dataclass(frozen=True)
class PlannedRows(PlannedCovariance):
    """So many numbers for each feature, and nothing between features, after every operation."""

    width: int

    @property
    def nbytes(self) -> int:
        """Every number."""
        return self.batch * self.itemsize * self.size * self.width

    def joined(self, result: Result, nonlinear: bool = False) -> Cost:
        """As many numbers for each feature of the result."""
        del nonlinear
        made = replace(self, size=result.size, itemsize=result.itemsize)
        return Cost(made, work=2.0 * result.taps * self.batch * self.width * result.size)

    def push(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def take(self, index: Tensor, result: Result) -> Cost:
        """Rows."""
        del index
        return self.joined(result)

    def scale(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def plus(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Rows."""
        del vectors, grid
        return self.joined(result, nonlinear=True)

    def map(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)


@final
@dataclass(frozen=True)
class PlannedTangents(PlannedRows):
    """Rows of a sketch, which runs are to share.

    kept: for the backward pass, behind a nonlinearity that remembers them.
    """

    remembers: bool
    runs: int
    kept: bool = False

    @property
    def backward_share(self) -> float:
        """A row for each feature of the result, in each run."""
        return self.runs * self.size / self.width

    @property
    def released(self) -> PlannedRows | None:
        """What nonlinearities remember."""
        return self if self.kept else None

    def joined(self, result: Result, nonlinear: bool = False) -> Cost:
        """What enters at a nonlinearity is remembered."""
        kept = nonlinear and self.remembers
        made = replace(self, size=result.size, itemsize=result.itemsize, kept=kept)
        return super().joined(result)._replace(structure=made)
