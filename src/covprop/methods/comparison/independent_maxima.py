"""Maxima of elements that are taken as independent, whatever is known (Gast & Roth 2018)."""

from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from covprop.carriers import Full, Planned
from covprop.carriers.planned import PRODUCT
from covprop.carriers.variances import independent_maximum
from covprop.covariance import Dense
from covprop.covariance.planned import Cost
from covprop.flow.carrier import Carrier, DiagonalTransfer
from covprop.flow.lineage import Transfer


@final
class IndependentMaxima(Full):
    """Full covariances, with the arguments of a maximum taken as independent."""

    def maximum(
        self, pair: Callable[[], tuple[Self, Self, Tensor, Tensor]]
    ) -> tuple[Tensor, Carrier]:
        """Cov_ij = (1 - p_i)(1 - p_j) A_ij + p_i p_j B_ij, and Clark's variance on the diagonal."""
        a, b, mean, other_mean = pair()
        a._reserve(mean)
        found = independent_maximum(a, b, mean, other_mean)
        first, second = 1 - found.share, found.share
        parts = a.covariance.scale(first), b.covariance.scale(second)
        matrix = parts[0].matrix() + parts[1].matrix() + torch.diag_embed(found.added)
        edges: list[tuple[Carrier, Transfer]] = [
            (a, DiagonalTransfer(first)),
            (b, DiagonalTransfer(second)),
        ]
        return found.mean, self._new(Dense(matrix), edges)

    def monotone_maximum(self, inside: Callable[[], Any], outside: Callable[[], Any]) -> Any:
        """Operation by operation, as published."""
        del inside
        return outside()


@final
class PlannedIndependentMaxima(Planned):
    """What a plan knows of them."""

    def maximum(
        self, pair: Callable[[], tuple[Self, Self, Tensor, Tensor]]
    ) -> tuple[Tensor, Planned]:
        """Two matrices, each scaled, and their sum."""
        a, b, mean, other_mean = pair()
        value = torch.maximum(mean, other_mean)
        result = a._result(value, b)
        cost = a.planned.joined(result)
        if cost is None:
            dense = a._dense(result)
            held = PRODUCT * dense.nbytes
            held += sum(one.planned.to_write for one in dict.fromkeys((a, b)))
            work = 4.0 * a.batch_shape.numel() * a.size**2
            cost = Cost(dense, held, work, held, writes=True)
        return value, a._new(value, cost, b)

    def monotone_maximum(self, inside: Callable[[], Any], outside: Callable[[], Any]) -> Any:
        """As of the covariances."""
        del inside
        return outside()
