"""Expected derivatives of the powers of functions with one kink, compiled or in torch."""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from covprop.kernels import compiled
from covprop.kernels.normal import cumulative, density, partial_expectation, standardise

POWERS, LENGTH = 3, 24
"""The highest power that the compiled code has, and so many orders."""


class _KinkedPowers(ctypes.Structure):
    """`KinkedPowers` of powers.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "highest", "length")),
        ("counts", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("b", "turn", "slope", "weight", "stddev")),
        *((name, ctypes.c_void_p) for name in ("above", "mean", "density", "results")),
    )


def kinked_powers(
    distance: Tensor,
    stddev: Tensor,
    before: float | Tensor,
    after: float | Tensor,
    counts: Sequence[int],
) -> list[Tensor]:
    """E[f^p He_k(xi)], p = 1, 2, ..., of a function with one kink; k below the count of each p.

    distance: of the mean from the kink; before, after: the slopes on its two sides. f is the
    function less its mean. With zeta = xi or -xi, so that the kink is at zeta = b >= 0,

        f / sigma = A zeta + w (psi - E[psi]),   psi = (zeta - b)_+,
        E[psi^p He_k] = p! / (p - k)! E[psi^(p - k)], beyond p! He_{k-p-1}(b) phi(b),

    and zeta He_k = He_{k+1} + k He_{k-1}. Nothing cancels: what is beyond the kink is small.
    """
    a, above = standardise(distance, stddev), distance >= 0
    before, after = (torch.as_tensor(t, dtype=a.dtype, device=a.device) for t in (before, after))
    b, turn = a.abs(), torch.where(above, -1.0, 1.0).to(a)
    slope, weight = turn * torch.where(above, after, before), after - before
    highest, length = len(counts), max(counts) + len(counts)
    # E[psi^p], of which the error is b^4 / 6 roundings of itself at p = 3.
    tails = [cumulative(-b), partial_expectation(-b)]
    waves = [density(b)]
    if highest <= POWERS and length < LENGTH and a.dtype is torch.float64:
        elements = b, turn, slope, weight, stddev, *tails, *waves
        if compiled.usable(*elements):
            return _compiled(elements, length, counts)
    waves.append(b * waves[0])
    for k in range(1, max(length - 2, highest)):
        waves.append(torch.addcmul(-k * waves[k - 1], b, waves[k]))
        tails.append(torch.addcmul(k * tails[k - 1], b, tails[k], value=-1))
    psi = a.new_zeros(highest + 1, length, *a.shape)
    psi[0, 0] = 1
    for p in range(1, highest + 1):
        for k in range(p + 1):
            psi[p, k] = math.perm(p, k) * tails[p - k]
        psi[p, p + 1 :] = math.factorial(p) * torch.stack(waves[: length - p - 1])
    centred = [psi[0]]
    for j in range(1, highest + 1):
        terms = [math.comb(j, i) * (-tails[1]) ** (j - i) * psi[i] for i in range(j)]
        centred.append(psi[j] + torch.stack(terms).sum(0))
    number = torch.arange(1.0, length, dtype=a.dtype, device=a.device)
    number = number.reshape(-1, *(1,) * a.dim())
    totals = [weight**p * centred[p] for p in range(1, highest + 1)]
    for j, rows in enumerate(centred[:-1]):
        for p in range(j + 1, highest + 1):  # binomial: zeta^(p - j) (psi - E[psi])^j
            raised = torch.zeros_like(rows)
            raised[:-1] = rows[1:]
            raised[1:].addcmul_(number, rows[:-1])
            rows = raised
            totals[p - 1].addcmul_(math.comb(p, j) * slope ** (p - j) * weight**j, rows)
    signs = torch.stack([turn if k % 2 else torch.ones_like(turn) for k in range(max(counts))])
    return [
        stddev**p * signs[:count] * total[:count]
        for p, (count, total) in enumerate(zip(counts, totals, strict=True), start=1)
    ]


def _compiled(elements: Sequence[Tensor], length: int, counts: Sequence[int]) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in elements))
    given = [tensor.expand(shape).contiguous() for tensor in elements]
    results = [given[0].new_empty(count, *shape) for count in counts]
    numbers = (ctypes.c_int64 * len(counts))(*counts)
    places = (ctypes.c_void_p * len(counts))(*(result.data_ptr() for result in results))
    call = _KinkedPowers(
        shape.numel(), len(counts), length, ctypes.addressof(numbers),
        *(tensor.data_ptr() for tensor in given), ctypes.addressof(places),
    )  # fmt: skip
    compiled.loaded().kinked_powers(ctypes.byref(call))
    return results
