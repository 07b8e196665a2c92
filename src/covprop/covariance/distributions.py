"""Covariances of torch's own distributions."""

from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
)

from covprop.covariance.base import Covariance
from covprop.covariance.diagonal import Diagonal
from covprop.covariance.low_rank import LowRank


def from_torch(distribution: Distribution) -> Covariance | Tensor:
    """The covariance of a normal distribution, in its structure."""
    if isinstance(distribution, LowRankMultivariateNormal):
        return LowRank(distribution.cov_factor, distribution.cov_diag)
    if isinstance(distribution, MultivariateNormal):
        return distribution.covariance_matrix
    if isinstance(distribution, Independent) and isinstance(distribution.base_dist, Normal):
        shape = (*distribution.batch_shape, distribution.event_shape.numel())
        return Diagonal(distribution.variance.reshape(shape))
    raise TypeError(
        f"{type(distribution).__name__} is not one of MultivariateNormal, "
        "LowRankMultivariateNormal and Independent(Normal(...), dims)"
    )
