"""Covariances of two different activations: the Hermite series, and integrals where it is long.

The error after K terms is at most |rho|^(K+1) r_i r_j, as for pairs of one activation.
"""

import torch
from torch import Tensor

from covprop.activations.base import Activated
from covprop.activations.nested import nested_cross
from covprop.kernels.normal import correlation, inverse_deviation, standard_deviation

ORDERS = (64, 512)
"""Of the series; the second where the first leaves more pairs to integrals than there are units."""
ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-11}
"""Bound of the error of the series, relative to the standard deviations."""
ROUNDING = 8.0
"""In units of machine epsilon: what rounding does to a variance left over after subtraction."""

Pairs = tuple[Tensor, ...]
"""The places of pairs in a matrix (*batch, rows, columns), one vector for each axis."""


def beyond_series(left: Activated, right: Activated, covariance: Tensor) -> tuple[int, Pairs]:
    """An order of the series, and the pairs for which it is too short."""
    degrees = [side.activation.degree for side in (left, right)]
    ends = [degree for degree in degrees if degree is not None]
    if ends:  # terms beyond are zero
        nothing = torch.zeros(0, dtype=torch.long, device=covariance.device)
        return min(ends), (nothing,) * covariance.dim()
    values = covariance.detach()
    inverse = [inverse_deviation(side.variance.detach()).to(values) for side in (left, right)]
    size = correlation(values, inverse[0][..., :, None], inverse[1][..., None, :]).abs_()
    for order in ORDERS:
        root = 1 / (order + 1)
        rows, columns = (_tail(side, order).pow(root).to(values) for side in (left, right))
        limit = ACCURACY[values.dtype] ** root
        pairs = (size * rows[..., :, None] * columns[..., None, :] > limit).nonzero(as_tuple=True)
        if len(pairs[0]) <= left.mean.numel() + right.mean.numel():
            break
    return order, pairs


def integrated(left: Activated, right: Activated, covariance: Tensor, pairs: Pairs) -> Tensor:
    """Cov[g(y_i), h(y_j)] = E[(g(y_i) - E g) (E[h(y_j) | y_i] - E h)] of pairs, in float64."""
    rows, columns = pairs[:-1], (*pairs[:-2], pairs[-1])
    inverse = inverse_deviation(left.variance)[rows], inverse_deviation(right.variance)[columns]
    rho = correlation(covariance[pairs].double(), *inverse)
    rho = rho + (rho.clamp(-1, 1) - rho).detach()  # beyond one by rounding
    stddev_1, stddev_2 = (standard_deviation(side.variance) for side in (left, right))
    moments = left.mean[rows], stddev_1[rows], right.mean[columns], stddev_2[columns]
    total = torch.zeros_like(rho)
    for factor, one in left.activation.scalars(left.mean, left.variance):
        for weight, other in right.activation.scalars(right.mean, right.variance):
            share = factor[rows] * weight[columns]
            functions = one.take(rows), other.take(columns)
            total = total + share * nested_cross(*functions, *moments, rho)
    return total


def _tail(side: Activated, order: int) -> Tensor:
    """The share of the deviation that is left after so many terms, and what rounding may hide."""
    # Not without gradients: what is computed here is kept, and used with them.
    coefficients, output = side.coefficients(order).detach(), side.output.detach()
    varies = output > 0
    share = side.variance.detach() * coefficients.square().sum(0) / torch.where(varies, output, 1)
    rest = (1 - share).clamp(min=0) + ROUNDING * torch.finfo(share.dtype).eps
    return torch.where(varies, rest.sqrt(), 0)
