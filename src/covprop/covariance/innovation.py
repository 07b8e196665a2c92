"""What an operation adds to a covariance beyond its expected linearisation.

For an activation, Sigma_z = D Sigma_y D + R with D = E[g'] and R = sum_{k>=2} (a_k a_k^T) o rho^k.
Its diagonal is known. Of the rest the second order is kept, as the products of two independent
sketches A, B of rho:  R_ij ~ w_i w_j (A_i . A_j) (B_i . B_j),  w = a_2.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric

HELD = 2**18
"""Products of two rows that are held at a time: they stay in cache."""
FEWEST = 32
"""Features that are seen at a time at least, while that takes no more than one element of a batch:
products of few are all memory."""


def random_signs(
    shape: torch.Size, like: Tensor, generator: torch.Generator | None, scale: Tensor | None = None
) -> Tensor:
    """Independent +-1, or +-scale: the fourth moment that makes estimates least noisy."""
    coins = torch.randint(2, shape, dtype=torch.int8, device=like.device, generator=generator)
    signs = coins.to(like.dtype)
    return signs.mul_(2).sub_(1) if scale is None else signs.mul_(2 * scale).sub_(scale)


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
    rows T of which T^T T is added, beside the variances; left: what random tangents are to have of
    the variances beside what they share, if that is another number.
    """

    variance: Tensor
    pairs: tuple[Pairs, ...] = ()
    columns: Tensor | None = None
    left: Tensor | None = None

    @property
    def unshared(self) -> Tensor:
        """The variances of what each feature has alone in the tangents."""
        return self.variance if self.left is None else self.left

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T of J (*batch, p, n), some features at a time.

        <M_p, M_q> + sum_i J_pi J_qi (R_ii - S_ii),  M_p = sum_t A_t diag(w_t o J_p) B_t^T,
        S_ii what the first term has on the diagonal.
        """
        entries = rows[..., 0].numel()
        if self.pairs:
            entries += self.pairs[0].first.shape[-2] * self.pairs[0].second[..., 0].numel()
        step = max(1, HELD // max(1, entries))
        if step < FEWEST and rows.dim() > 2 and len(rows) > 1:  # noqa: PLR2004
            return torch.stack([self._of(i).quadratic(rows[i]) for i in range(len(rows))])
        total, seen = torch.zeros((), dtype=rows.dtype, device=rows.device), None
        for start in range(0, rows.shape[-1], step):
            part = slice(start, start + step)
            some, alone = rows[..., part], self.variance[..., part]
            if self.pairs:
                products = self._products(part)  # (*batch, r s, step)
                alone = alone - products.square().sum(-2)
                image = some @ products.mT
                seen = image if seen is None else seen + image
            total = total + (some * alone[..., None, :]) @ some.mT
        if seen is not None:
            total = total + seen @ seen.mT
        if self.columns is not None:
            known = rows @ self.columns.mT
            total = total + known @ known.mT
        return symmetric(total)

    def _of(self, place: int) -> "Innovation":
        """That of an element of the batch."""
        columns, left = (None if t is None else t[place] for t in (self.columns, self.left))
        pairs = tuple(Pairs(*(tensor[place] for tensor in pair)) for pair in self.pairs)
        return Innovation(self.variance[place], pairs, columns, left)

    def _products(self, part: slice) -> Tensor:
        """sum_t w_t A_t B_t^T of some features, flat: (*batch, r s, step)."""
        total: Tensor | None = None
        for weight, first, second in self.pairs:
            left = (first[..., part] * weight[..., None, part])[..., :, None, :]
            term = left * second[..., None, :, part]
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.flatten(-3, -2)
