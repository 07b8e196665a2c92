"""Means and covariances as objects of torch.distributions, and back."""

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
)

from covprop.covariance import Covariance, Diagonal, LowRank
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import standard_deviation


def from_distribution(distribution: Distribution) -> tuple[Tensor, Covariance | Tensor]:
    """Mean and covariance of a Gaussian of torch's, in its structure."""
    if isinstance(distribution, LowRankMultivariateNormal):
        return distribution.mean, LowRank(distribution.cov_factor, distribution.cov_diag)
    if isinstance(distribution, MultivariateNormal):
        return distribution.mean, distribution.covariance_matrix
    if isinstance(distribution, Independent) and isinstance(distribution.base_dist, Normal):
        shape = (*distribution.batch_shape, distribution.event_shape.numel())
        return distribution.mean, Diagonal(distribution.variance.reshape(shape))
    raise TypeError(
        f"{type(distribution).__name__} is not one of MultivariateNormal, "
        "LowRankMultivariateNormal and Independent(Normal(...), dims)"
    )


ROUNDING = 8.0
"""In units of machine epsilon, for each feature: what Cholesky leaves of a variance of zero."""


def to_distribution(mean: Tensor, covariance: Covariance) -> Distribution:
    """MultivariateNormal over the flattened event, or its low-rank or independent kind."""
    flat = mean.reshape(*covariance.batch_shape, -1)
    if isinstance(covariance, Diagonal):
        stddev = _positive(standard_deviation(covariance.values)).reshape(mean.shape)
        return Independent(Normal(mean, stddev), mean.dim() - len(covariance.batch_shape))
    if isinstance(covariance, LowRank) and covariance.values is not None:
        own = _positive(covariance.values)
        if covariance.rank == 0:  # which torch's low-rank kind does not take
            return Independent(Normal(flat, standard_deviation(own)), 1)
        return LowRankMultivariateNormal(flat, covariance.factor, own)
    matrix = covariance.matrix()
    try:
        result = MultivariateNormal(flat, matrix)
    except (ValueError, RuntimeError) as error:  # the latter from Cholesky
        raise _singular() from error
    # What is left of a variance given those before it: where it is rounding, so is a density.
    left = result.scale_tril.diagonal(dim1=-2, dim2=-1).square()
    rounding = ROUNDING * torch.finfo(mean.dtype).eps * covariance.size
    _positive(left - rounding * covariance.diagonal())
    return result


def _positive(values: Tensor) -> Tensor:
    """Check it here: torch.compile turns the checks of torch.distributions off for good."""
    if not bool((values > 0).all()):
        raise _singular()
    return values


def _singular() -> InvalidGaussian:
    return InvalidGaussian(
        "torch.distributions needs a positive definite covariance and this one is "
        "singular; .sample() works all the same"
    )
