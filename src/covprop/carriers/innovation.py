"""What an operation adds to a covariance beyond its expected linearisation.

For an activation, Sigma_z = D Sigma_y D + R with D = E[g'] and R = sum_{k>=2} (a_k a_k^T) o rho^k.
Its diagonal is known. Of the rest the second order is kept, as the products of two independent
sketches A, B of rho:  R_ij ~ w_i w_j (A_i . A_j) (B_i . B_j),  w = a_2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric

HELD = 2**18
"""Products of two rows that are held at a time: they stay in cache."""
SMALLEST_BLOCK = 32
"""Features that are seen at a time at least, while that takes no more than one element of a batch:
products of few are all memory."""


def random_signs(
    shape: torch.Size, like: Tensor, generator: torch.Generator | None, scale: Tensor | None = None
) -> Tensor:
    """Independent +-1, or +-scale: the fourth moment that makes estimates least noisy."""
    coins = torch.randint(2, shape, dtype=torch.int8, device=like.device, generator=generator)
    signs = coins.to(like.dtype)
    return signs.mul_(2).sub_(1) if scale is None else signs.mul_(2 * scale).sub_(scale)


Layout: TypeAlias = tuple[tuple[int, int], ...]


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
    the variances beside what they share, if that is another number; layout: names of the rows of
    A and of B, with how many there are of each.
    """

    variance: Tensor
    pairs: tuple[Pairs, ...] = ()
    columns: Tensor | None = None
    left: Tensor | None = None
    layout: Layout = ()

    @property
    def unshared(self) -> Tensor:
        """The variances of the independent part of each feature, in the tangents."""
        return self.variance if self.left is None else self.left

    @property
    def shares(self) -> bool:
        """Whether features share noise, beyond their variances."""
        return bool(self.pairs) or self.columns is not None

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T of J (*batch, p, n)."""
        return joint_quadratic([(self, rows)])

    def entries(self, rows: Tensor) -> int:
        """Temporary numbers for each feature of a block."""
        count = rows[..., 0].numel()
        if self.pairs:
            count += self.pairs[0].first.shape[-2] * self.pairs[0].second[..., 0].numel()
        return count

    def seen(self, rows: Tensor, definite: bool = False) -> tuple[Tensor, Tensor | None]:
        """The diagonal part J (R - S) J^T, and M (*batch, p, r s), some at a time.

        M_p = sum_t A_t diag(w_t o J_p) B_t^T, and S_ii what <M_p, M_q> has on the diagonal. By
        chance S may be more than R; definite: R - S is clamped at zero.
        """
        step = max(1, HELD // max(1, self.entries(rows)))
        total, seen = torch.zeros((), dtype=rows.dtype, device=rows.device), None
        for start in range(0, rows.shape[-1], step):
            part = slice(start, start + step)
            some, diagonal = rows[..., part], self.variance[..., part]
            if self.pairs:
                products = self._products(part)  # (*batch, r s, step)
                diagonal = _difference(diagonal, products.square().sum(-2), products.shape[-2])
                image = some @ products.mT
                seen = image if seen is None else seen + image
            diagonal = diagonal.clamp(min=0) if definite else diagonal
            total = total + (some * diagonal[..., None, :]) @ some.mT
        return total, seen

    def element(self, place: int) -> "Innovation":
        """The innovation of one element of the batch."""
        columns, left = (None if t is None else t[place] for t in (self.columns, self.left))
        pairs = tuple(Pairs(*(tensor[place] for tensor in pair)) for pair in self.pairs)
        return Innovation(self.variance[place], pairs, columns, left, self.layout)

    def _products(self, part: slice) -> Tensor:
        """sum_t w_t A_t B_t^T of some features, flat: (*batch, r s, step)."""
        total: Tensor | None = None
        for weight, first, second in self.pairs:
            left = (first[..., part] * weight[..., None, part])[..., :, None, :]
            term = left * second[..., None, :, part]
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.flatten(-3, -2)


def _difference(left: Tensor, right: Tensor, count: int) -> Tensor:
    """left - right, zero where that is the rounding of so many products that right is the sum of.

    What is left of equal numbers would be as often below zero as above.
    """
    rounding = torch.finfo(left.dtype).eps * (count + 1) * torch.maximum(left.abs(), right)
    found = left - right
    return torch.where(found.abs() > rounding, found, 0)


def joint_quadratic(parts: Sequence[tuple[Innovation, Tensor]], definite: bool = False) -> Tensor:
    """Var(sum_l J_l e_l) of innovations e_l that share their second order, J_l (*batch, p, n_l).

    Matrices M add, and images of columns, as they are made of the same noise for all. definite:
    a sum of squares only, which has no variance below zero.
    """
    rows = parts[0][1]
    most = max(innovation.entries(seen) for innovation, seen in parts)
    if HELD // max(1, most) < SMALLEST_BLOCK and rows.dim() > 2 and len(rows) > 1:  # noqa: PLR2004
        each = [[(one.element(i), seen[i]) for one, seen in parts] for i in range(len(rows))]
        return torch.stack([joint_quadratic(elements, definite) for elements in each])
    total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    union = dict(name for innovation, _ in parts for name in innovation.layout)
    matrices: list[Tensor] = []
    columns: list[Tensor] = []
    for innovation, seen in parts:
        diagonal, matrix = innovation.seen(seen, definite)
        total = total + diagonal
        if matrix is not None:
            matrices.append(_placed(matrix, innovation.layout, tuple(union.items())))
        if innovation.columns is not None:
            columns.append(seen @ innovation.columns.mT)
    for images in (matrices, columns):
        if images:
            image = reduce(torch.add, images)
            total = total + image @ image.mT
    return symmetric(total)


def _placed(matrix: Tensor, layout: Layout, union: Layout) -> Tensor:
    """M (*batch, p, r s) of named rows among those of a union, zero at the others."""
    if layout == union:
        return matrix
    starts = dict(zip(dict(union), accumulate([0, *dict(union).values()]), strict=False))
    index = torch.cat(
        [torch.arange(starts[name], starts[name] + count) for name, count in layout]
    ).to(matrix.device)
    size = sum(count for _, count in union)
    result = matrix.new_zeros(*matrix.shape[:-1], size, size)
    result[..., index[:, None], index] = matrix.unflatten(-1, (len(index), len(index)))
    return result.flatten(-2)
