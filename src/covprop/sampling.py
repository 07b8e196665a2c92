"""How far moments that come of samples may be off."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class SamplingError:
    """How far moments that were found from samples may be off: one standard error of each."""

    samples: int
    mean: Tensor
    """(*batch, *event)"""
    covariance: Tensor
    """(*batch, n, n)"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "SamplingError":
        """Apply a function to the tensors inside."""
        return SamplingError(self.samples, function(self.mean), function(self.covariance))
