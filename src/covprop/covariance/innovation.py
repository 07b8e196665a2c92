"""What an operation adds to a covariance beyond its expected linearisation.

For an activation, Sigma_z = D Sigma_y D + R with D = E[g'] and R = sum_{k>=2} (a_k a_k^T) o rho^k.
Its diagonal is known. Of the rest the second order is kept, as the products of two independent
sketches A, B of rho:  R_ij ~ w_i w_j (A_i . A_j) (B_i . B_j),  w = a_2.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric

HELD = 2**18
"""Products of two rows that are held at a time: they stay in cache."""


def random_signs(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Independent +-1, which have the fourth moment that makes estimates least noisy."""
    coins = torch.randint(2, shape, dtype=torch.int8, device=like.device, generator=generator)
    return coins.to(like.dtype).mul_(2).sub_(1)


class Pairs(NamedTuple):
    """w_i A_i B_i^T, one term of a bilinear form of two independent noises.

    weight (*batch, n), first and second: rows (*batch, r, n).
    """

    weight: Tensor
    first: Tensor
    second: Tensor


@final
@dataclass(frozen=True)
class Innovation:
    """Variances (*batch, n), what of them is shared between features, and columns that are known.

    pairs: terms of e^T (sum_t w_t A_t B_t^T) e' with standard normal e, e'; columns (*batch, r, n):
    rows T of which T^T T is added, beside the variances; left: the variances without what, in
    expectation, the pairs have of them.
    """

    variance: Tensor
    pairs: tuple[Pairs, ...] = ()
    columns: Tensor | None = None
    left: Tensor | None = None

    @property
    def unshared(self) -> Tensor:
        """The variances without what is shared."""
        return self.variance if self.left is None else self.left

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T of J (*batch, p, n).

        <M_p, M_q> + sum_i J_pi J_qi (R_ii - S_ii),  M_p = sum_t A_t diag(w_t o J_p) B_t^T,
        S_ii what the first term has on the diagonal.
        """
        total = (rows * (self.variance - self._estimated)[..., None, :]) @ rows.mT
        if self.pairs:
            seen = self._seen(rows)
            total = total + seen @ seen.mT
        if self.columns is not None:
            known = rows @ self.columns.mT
            total = total + known @ known.mT
        return symmetric(total)

    @cached_property
    def _estimated(self) -> Tensor:
        """The diagonal of what the pairs say."""
        total = torch.zeros_like(self.variance)
        for i, (weight, first, second) in enumerate(self.pairs):
            total = total + weight.square() * first.square().sum(-2) * second.square().sum(-2)
            for other in self.pairs[:i]:
                inner = (first * other.first).sum(-2) * (second * other.second).sum(-2)
                total = total + 2 * weight * other.weight * inner
        return total

    def _seen(self, rows: Tensor) -> Tensor:
        """M_p of all rows, flat: (*batch, p, r s), some features at a time."""
        pairs = self.pairs
        entries = pairs[0].first.shape[-2] * pairs[0].second[..., 0].numel()
        total: Tensor | None = None
        for start in range(0, rows.shape[-1], step := max(1, HELD // max(1, entries))):
            part = slice(start, start + step)
            products: Tensor | None = None
            for weight, first, second in pairs:
                left = (first[..., part] * weight[..., None, part])[..., :, None, :]
                term = left * second[..., None, :, part]  # (*batch, r, s, step)
                products = term if products is None else products.add_(term)
            assert products is not None
            seen = rows[..., part] @ products.flatten(-3, -2).mT
            total = seen if total is None else total + seen
        assert total is not None
        return total
