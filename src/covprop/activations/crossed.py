"""Covariances of two different activations: a series, and integrals of pairs where it is long."""

import torch
from torch import Tensor

from covprop.activations.base import Activated
from covprop.activations.nested import ScalarPair, pair_covariance
from covprop.kernels.normal import correlation, inverse_deviation, standard_deviation
from covprop.kernels.rounding import REMAINDER, rounding

ORDERS = (64, 512)
"""Orders of the series of two different activations; the second where the first leaves more pairs
to integrals than there are units."""
ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-11}
"""Bound of the error of that series, relative to the standard deviations."""

Places = tuple[Tensor, ...]
"""The places of pairs in a matrix (*batch, rows, columns), one vector for each axis."""


def beyond_series(left: Activated, right: Activated, covariance: Tensor) -> tuple[int, Places]:
    """An order of the series of two activations, and the pairs for which it is too short.

    The error after K terms is at most |rho|^(K+1) r_i r_j, as for pairs of one activation.
    """
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
        reached = size * rows[..., :, None] * columns[..., None, :] <= limit
        pairs = (~reached).nonzero(as_tuple=True)  # also what is not a number
        if len(pairs[0]) <= left.mean.numel() + right.mean.numel():
            break
    return order, pairs


def _tail(side: Activated, order: int) -> Tensor:
    """The share of the deviation that is left after so many terms, and what rounding may hide."""
    # Not without gradients: what is computed here is kept, and used with them.
    coefficients, output = side.coefficients(order).detach(), side.output.detach()
    varies = output > 0
    explained = coefficients * (side.variance.detach() * coefficients)  # a square may overflow
    share = explained.sum(0) / torch.where(varies, output, 1)
    rest = (1 - share).clamp(min=0) + rounding(REMAINDER, share.dtype)
    return torch.where(varies, rest.sqrt(), 0)


def integrated(left: Activated, right: Activated, covariance: Tensor, pairs: Places) -> Tensor:
    """Cov[g(y_i), h(y_j)] = E[(g(y_i) - E g) (E[h(y_j) | y_i] - E h)] of pairs, in float64."""
    rows, columns = pairs[:-1], (*pairs[:-2], pairs[-1])
    inverse = inverse_deviation(left.variance)[rows], inverse_deviation(right.variance)[columns]
    rho = correlation(covariance[pairs].double(), *inverse)
    rho = rho + (rho.clamp(-1, 1) - rho).detach()  # beyond one by rounding
    stddev_1, stddev_2 = (standard_deviation(side.variance) for side in (left, right))
    one = left.mean[rows], stddev_1[rows]
    two = right.mean[columns], stddev_2[columns]
    total = torch.zeros_like(rho)
    for factor, first in left.activation.scalars(left.mean, left.variance):
        for weight, second in right.activation.scalars(right.mean, right.variance):
            share = factor[rows] * weight[columns]
            g, h = first.take(rows), second.take(columns)
            # The slope of what jumps is integrated over its own variable; a closed mean is used
            # for the other one, and before others that of waves, which it often leaves nothing of.
            closed = g.conditional_mean is not None and (g.periodic or h.conditional_mean is None)
            if h.jumps or (closed and not g.jumps):
                value = pair_covariance(ScalarPair(h, g), *two, *one, rho)
            else:
                value = pair_covariance(ScalarPair(g, h), *one, *two, rho)
            total = total + share * value
    return total
