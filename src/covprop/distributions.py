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
from covprop.errors import CovpropError, InvalidGaussian
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
    try:
        if isinstance(covariance, Diagonal):
            stddev = standard_deviation(covariance.values).reshape(mean.shape)
            return Independent(Normal(mean, stddev), mean.dim() - len(covariance.batch_shape))
        if isinstance(covariance, LowRank) and covariance.values is not None:
            if covariance.rank == 0:  # which torch's low-rank kind does not take
                return Independent(Normal(flat, standard_deviation(covariance.values)), 1)
            return LowRankMultivariateNormal(flat, covariance.factor, covariance.values)
        result = MultivariateNormal(flat, covariance.matrix())
        # What is left of a variance given those before it: where it is rounding, so is a density.
        left = result.scale_tril.detach().diagonal(dim1=-2, dim2=-1).square()
        rounding = ROUNDING * torch.finfo(mean.dtype).eps * covariance.size
        if bool((left <= rounding * covariance.diagonal().detach()).any()):
            raise ValueError("it is singular but for rounding")
        return result
    except CovpropError:  # of a structure that is not written out
        raise
    except (ValueError, RuntimeError) as error:  # the latter from Cholesky
        raise InvalidGaussian(
            "torch.distributions needs a positive definite covariance and this one is "
            "singular; .sample() works all the same"
        ) from error
