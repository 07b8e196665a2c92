"""Standard errors of what was sampled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class SamplingError:
    """Standard errors of moments that come from samples."""

    samples: int
    mean: Tensor
    """(*batch, *event)"""
    covariance: Tensor
    """(*batch, n, n)"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "SamplingError":
        """Apply a function to the tensors inside."""
        return SamplingError(self.samples, function(self.mean), function(self.covariance))
