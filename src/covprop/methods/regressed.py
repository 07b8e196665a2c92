"""Samples and a control variate of known moments, with the coefficients that help most.

With f the samples, g the control variate times its slope, P_ij and Q_ij the products of deviations
of f and of g, and K the known covariance of g:

    mean = mean(f - g),  covariance = mean(P) - c o (mean(Q) - K),  c = Cov(P, Q) / Var(Q)

which has the variance Var(P) - Cov(P, Q)^2 / Var(Q) over the number of samples: never more than
that of P alone, and with nothing in common c is zero, and the moments are those of the samples.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric
from covprop.kernels.normal import is_finite
from covprop.methods.base import Estimate
from covprop.methods.streaming import add_products
from covprop.sampling import SamplingError

BELIEVED = 0.1
"""Of the sampled variance of a combination of outputs, at least: where a control variate leaves
less, the samples are too few to know its coefficients, and are taken without it."""


class Coefficients(NamedTuple):
    """Of the control variate (*batch, m), and of its products 1 - c (*batch, m, m)."""

    slope: Tensor
    rest: Tensor


class _Products(NamedTuple):
    """Sums over samples of P - Q, Q, (P - Q)^2, (P - Q) Q and Q^2, each (*batch, m, m).

    Of u = f - g and v = f + g, P - Q is w_ij = (u_i v_j + v_i u_j) / 2: small where u is, as a
    difference of squares would not be.
    """

    difference: Tensor
    control: Tensor
    squares: Tensor
    mixed: Tensor
    squares_of_control: Tensor

    @classmethod
    def of(cls, values: Tensor, control: Tensor) -> "_Products":
        """Of deviations (count, *batch, m)."""
        rest, total = values - control, values + control
        squares = _sums(rest.square(), total.square()).div_(2)
        both = rest * total
        add_products(squares, both, both, 0.5)
        return cls(
            _sums(rest, total),
            _sums(control, control),
            squares,
            _sums(rest * control, total * control),
            _sums(control.square(), control.square()),
        )


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """Over samples, of (l_i r_j + r_i l_j) / 2."""
    total = left.new_zeros(*left.shape[1:], left.shape[-1])
    add_products(total, left, right)
    return symmetric(total)


def fitted(values: Tensor, control: Tensor) -> Coefficients:
    """The coefficients of least variance, by samples (count, *batch, m) of both."""
    values, control = values - values.mean(0), control - control.mean(0)
    square = control.square().sum(0)
    common = (values * control).sum(0)
    slope = torch.where(square > 0, common / torch.where(square > 0, square, 1), 0)
    sums, count = _Products.of(values, slope * control), len(values)
    spread = sums.squares_of_control - sums.control.square() / count
    common = sums.mixed - sums.difference * sums.control / count
    known = spread > 0
    rest = torch.where(known, -common / torch.where(known, spread, 1), 1)
    return Coefficients(slope, rest)


@final
class Group:
    """The values of a group of samples and of their control variate, chunk after chunk."""

    def __init__(self) -> None:
        """None yet."""
        self._values: list[Tensor] = []
        self._control: list[Tensor] = []

    def add(self, values: Tensor, control: Tensor) -> None:
        """Some more (count, *batch, m)."""
        self._values.append(values)
        self._control.append(control)

    def taken(self) -> tuple[Tensor, Tensor]:
        """All of them; the group is empty then."""
        both = torch.cat(self._values), torch.cat(self._control)
        self._values, self._control = [], []
        return both


@final
class Tally:
    """Averages over groups, with the coefficients of the first: they are constants to the others.

    known: the covariance of the control variate, or 0.
    """

    def __init__(self, known: Tensor | float) -> None:
        """No group yet."""
        self._known, self._groups = known, 0
        self._first: Tensor | None = None
        self._still: Tensor | None = None
        self._coefficients: Coefficients | None = None
        self._sums: list[Tensor] = []

    def add(self, group: Group) -> None:
        """The moments of a group."""
        values, control = group.taken()
        self._first = values[0] if self._first is None else self._first
        still = (values == self._first).all(0)
        self._still = still if self._still is None else self._still & still
        if self._coefficients is None:
            self._coefficients = fitted(values, control)
        found = _moments(values, control, self._coefficients, self._known)
        self._groups += 1
        if not self._sums:
            self._sums = list(found)
            return
        for total, one in zip(self._sums, found, strict=True):
            total += one

    def unseen(self) -> Tensor:
        """Variances (*batch, m) of the control where the outputs are the same for all samples."""
        assert self._still is not None
        if not isinstance(self._known, Tensor):
            return torch.zeros_like(self._still, dtype=torch.float64)
        return torch.where(self._still, self._known.diagonal(dim1=-2, dim2=-1), 0)

    def estimate(self, samples: int, dtype: torch.dtype) -> Estimate:
        """Mean and covariance of all groups, and their standard errors."""
        mean, covariance, plain = (total / self._groups for total in self._sums[:3])
        errors = (total.sqrt().div(self._groups).to(dtype) for total in self._sums[3:])
        matrix = believed(covariance, plain)
        return mean.to(dtype), matrix.to(dtype), SamplingError(samples, *errors)


def completed(estimate: Estimate, control: Tensor, mean: Tensor, covariance: Tensor) -> Estimate:
    """An estimate with the moments of another method for outputs that samples saw nothing of.

    control: variances (*batch, m) that those outputs have at least, zero for others. Samples that
    are all the same have no say in them: the variances may be off by as much again, and covariances
    with other outputs, which stay zero, by what they could be at most.
    """
    found, matrix, error = estimate
    assert error is not None
    unseen = control > 0
    both = unseen[..., :, None] & unseen[..., None, :]
    either = unseen[..., :, None] | unseen[..., None, :]
    matrix = torch.where(both, covariance.to(matrix), torch.where(either, 0, matrix))
    variance = torch.maximum(matrix.diagonal(dim1=-2, dim2=-1), control.to(matrix))
    most = (variance[..., :, None] * variance[..., None, :]).sqrt()
    errors = SamplingError(
        error.samples,
        torch.where(unseen, (variance / error.samples).sqrt(), error.mean),
        torch.where(either, most, error.covariance),
    )
    return torch.where(unseen, mean.to(found), found), matrix, errors


def _moments(
    values: Tensor, control: Tensor, coefficients: Coefficients, known: Tensor | float
) -> Sequence[Tensor]:
    """Mean, covariance, that of the samples alone, and the variances of the first two."""
    slope, rest = coefficients
    count = len(values)
    control = control * slope
    mean = (values - control).mean(0)
    values, control = values - values.mean(0), control - control.mean(0)
    of_mean = (values - control).square().sum(0) / (count * (count - 2))
    difference, inner, squares, mixed, of_control = _Products.of(values, control)
    squares.addcmul_(rest, mixed, value=2).addcmul_(of_control.mul_(rest), rest)
    del mixed, of_control
    total = difference + rest * inner
    squares.addcmul_(total, total, value=-1 / count).clamp_(min=0).div_(count * (count - 2))
    plain = difference.add_(inner).div_(count - 1)
    # (1 - rest) K, K of the control variate times its slope.
    scaled = inner.copy_(known) if isinstance(known, Tensor) else inner.zero_()
    scaled.mul_(slope[..., :, None]).mul_(slope[..., None, :])
    covariance = total.div_(count - 1).add_(scaled).addcmul_(rest, scaled, value=-1)
    return mean, covariance, plain, of_mean, squares


def believed(covariance: Tensor, plain: Tensor) -> Tensor:
    """A covariance (*batch, m, m) that is positive semi-definite, as that of the samples is.

    In units in which the sampled covariance is 1, directions in which less is left than can be
    believed have what was sampled.
    """
    if not (is_finite(covariance) and is_finite(plain)):
        return covariance  # it is refused with a reason, as every result is
    covariance = symmetric(covariance)
    if _is_sound(covariance, plain):
        return covariance
    plain = symmetric(plain)
    sizes, axes = torch.linalg.eigh(plain)
    varies = sizes > _rounding(sizes)
    root = torch.where(varies, sizes, 0).sqrt()
    white = axes * torch.where(varies, 1 / torch.where(varies, root, 1), 0)[..., None, :]
    shares = symmetric(white.mT @ covariance @ white) + torch.diag_embed((~varies).to(white))
    shares, turns = torch.linalg.eigh(shares)
    values = torch.linalg.eigvalsh(covariance)
    sound = (values[..., 0] >= -_rounding(values)[..., 0]) & (shares[..., 0] >= BELIEVED)
    factor = (axes * root[..., None, :]) @ turns
    kept = torch.where(shares < BELIEVED, 1, shares)
    mended = symmetric((factor * kept[..., None, :]) @ factor.mT)
    return torch.where(sound[..., None, None], covariance, mended)


def _is_sound(covariance: Tensor, plain: Tensor) -> bool:
    """Whether enough is left of every combination of outputs: a factor tells it at once."""
    if not covariance.numel():
        return True
    left = torch.sub(covariance, plain, alpha=BELIEVED)
    largest = plain.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    rounding = torch.finfo(left.dtype).eps * left.shape[-1] * largest
    left.diagonal(dim1=-2, dim2=-1).add_(rounding)
    return not bool(torch.linalg.cholesky_ex(left).info.any())


def _rounding(values: Tensor) -> Tensor:
    """What of eigenvalues, in ascending order, is rounding."""
    scale = torch.maximum(values[..., -1:].abs(), values[..., :1].abs())
    return torch.finfo(values.dtype).eps * values.shape[-1] * scale
