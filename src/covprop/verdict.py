"""What of a method's errors the error of sampling does not explain."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import final

import torch
from torch import Tensor

from covprop.comparison import FINE, Agreement
from covprop.divergences import kl_divergence
from covprop.gaussian import Gaussian
from covprop.report.table import in_digits, in_percent

DOUBT = 0.01
"""Probability that sampling alone makes any figure of a right method look wrong, about."""
TESTS = 3
"""It is shared by tests of the means, of the covariances, and of all together."""
ROUNDING = 32.0
"""In units of machine epsilon: differences that are none, where nothing varies."""
RARE = 0.1
"""Relative standard error of a sampled variance from which a unit is rarely active."""
TINY = math.sqrt(torch.finfo(torch.float64).tiny)
UNKNOWN = 0.2
"""The same error from which an output does not count in the divergence."""
TWICE = 2.0
"""How much more of a variance than of a mean a kink that was never met may change, at most."""
SKEW = 0.5
"""Of z^2 times that error: how much wider than normal its sampled moments are held to be."""


@final
@dataclass(frozen=True)
class Verdict:
    """A method's Gaussian against a sampled one, in float64, outputs flattened.

    The standard errors that samples tell of a rarely active unit are themselves uncertain, and
    smallest where the estimate is most wrong, so they are taken at the larger of the sampled and
    the method's variance, and the skewness of the estimate (at most its relative error for a mean,
    by Pearson's inequality) widens what a normal distribution allows. What no sample has shown has
    no standard error: with a control variate, kinks that are far away are all that is left, and may
    not have been met at all.
    """

    found: Gaussian
    truth: Gaussian

    def of(self, agreement: Agreement) -> str:
        """The largest errors that sampling does not explain, one by one or else all together."""
        in_mean, in_covariance = self.in_mean(), self.in_covariance()
        in_variance = in_covariance.diagonal(dim1=-2, dim2=-1)
        parts = []
        if bool(in_mean.any()):
            worst = _largest(agreement.mean_error.reshape(in_mean.shape)[in_mean])
            parts.append(f"mean off by {in_digits(worst, 2)} std")
        if bool(in_variance.any()):
            worst = _largest(agreement.variance_ratio.reshape(in_mean.shape)[in_variance] - 1)
            parts.append(f"variance off by {in_percent(worst)}")
        elif bool(in_covariance.any()):
            worst = _largest(agreement.covariance_error[in_covariance.any(-1).any(-1)])
            parts.append(f"covariance off by {in_percent(worst)}")
        if parts:
            return ", ".join(parts)
        times, surprising = self.jointly()
        if not bool(surprising.any()):
            return FINE
        return f"each moment {FINE}, but KL {in_digits(float(times[surprising].max()), 2)} times it"

    def in_mean(self) -> Tensor:
        """Which means are surprising, (*batch, n).

        Without assumptions on the distribution, |mean - sampled mean| exceeds
        sqrt(variance / (N doubt)) with a probability of at most the doubt (Chebyshev).
        """
        variance, size = self._variance, self._shift.abs()
        doubt = DOUBT / TESTS / max(1, size.numel())
        stderr = _flat(self.truth, self.truth.mean_stderr) * self._growth
        missed = self._chance(doubt) * self._sampled.sqrt() * self._growth
        allowed = stderr * self._wide(size.numel(), self._relative) + missed
        beyond = self._seen & (size > allowed)
        impossible = size > (variance / (self._samples * doubt)).sqrt() + self._still
        return (beyond & (size > self._still)) | impossible | self._unseen(doubt)

    def in_covariance(self) -> Tensor:
        """Which covariances are surprising, (*batch, n, n).

        Their standard error is at least that of independent outputs, sqrt(variances / N), since
        samples tell nothing of what rarely happens to two at once; where a unit is rarely active it
        is the most that those of the variances allow: E[a^2 b^2] <= sqrt(E[a^4] E[b^4]). A sampled
        variance exceeds variance / doubt with a probability of at most the doubt (Markov).
        """
        difference = (self._ours - self._matrix).abs()
        doubt = DOUBT / TESTS / max(1, difference.numel())
        relative = self._relative
        largest = (relative.square() + 1 / self._samples).sqrt() * self._sampled * self._growth**2
        rare = _pairs(torch.maximum, relative, relative) > RARE
        rare.diagonal(dim1=-2, dim2=-1).fill_(False)
        stderr = self._spread * _pairs(torch.mul, self._growth, self._growth)
        least = torch.minimum(relative / math.sqrt(2), relative.new_tensor(self._samples**-0.5))
        least = least * self._sampled * self._growth**2
        stderr = torch.maximum(stderr, _pairs(torch.mul, least, least).sqrt())
        bound = _pairs(torch.mul, largest, largest).sqrt()
        stderr = torch.where(rare, torch.maximum(stderr, bound), stderr)
        wide = self._wide(difference.numel(), _pairs(torch.maximum, relative, relative))
        known = _pairs(torch.logical_and, self._seen, self._seen)
        deviation = self._sampled.sqrt() * self._growth
        missed = TWICE * self._chance(doubt) * _pairs(torch.mul, deviation, deviation)
        beyond = known & (difference > stderr * wide + missed + self._least)
        rounding = self._least.diagonal(dim1=-2, dim2=-1)
        impossible = (self._sampled > self._variance / doubt + rounding) | self._constant
        impossible |= self._unseen(doubt) & (self._variance > rounding)
        return beyond | torch.diag_embed(impossible)

    def jointly(self) -> tuple[Tensor, Tensor]:
        """Divergences over those of Gaussian samples, and which are not by chance, (*batch).

        Of N Gaussian samples of rank k, 2 N KL has about a chi-squared distribution with
        k (k + 3) / 2 degrees of freedom; it is divided by the most that any entry of the covariance
        varies more than it would in Gaussian samples, as the standard errors tell. They do not tell
        it of combinations of outputs that hardly vary, so this is a hint and no proof. Rarely
        active units are left out, and so is what rounding can do.
        """
        kept = self._seen & (self._relative <= UNKNOWN)
        both = _pairs(torch.logical_and, kept, kept)
        first, second = (
            self._only(kept, both, mean, matrix)
            for mean, matrix in (
                (torch.zeros_like(self._shift), self._matrix), (self._shift, self._ours)
            )
        )  # fmt: skip
        divergence = kl_divergence(first, second)
        expected = _pairs(torch.mul, self._sampled, self._sampled) + self._matrix.square()
        expected = torch.where(both & (expected > 0), expected, math.inf)
        ratio = (self._spread.square() * self._samples / expected).amax((-2, -1)).clamp(min=1)
        values = torch.linalg.eigvalsh(torch.where(both, self._matrix, 0))
        count = rank(values, self.truth.dtype).double()
        freedom = (count * (count + 3) / 2).clamp(min=1)
        rounding = self._rounding_divergence(values, both, kept)
        statistic = (divergence.sqrt() - rounding.sqrt()).clamp(min=0).square()
        statistic = 2 * self._samples * statistic / ratio
        finite = torch.isfinite(statistic)
        chance = torch.special.gammaincc(freedom / 2, torch.where(finite, statistic, 0) / 2)
        times = divergence / (freedom / (2 * self._samples))
        return times, finite & (chance < DOUBT / TESTS / max(1, chance.numel()))

    def _rounding_divergence(self, values: Tensor, both: Tensor, kept: Tensor) -> Tensor:
        """At most, to second order: (|dm|^2 / l + |dC|^2 / (2 l^2)) / 2, l the least eigenvalue."""
        rounded = torch.finfo(self.truth.dtype).eps * values.shape[-1] * values[..., -1:]
        smallest = torch.where(values > rounded, values, math.inf).amin(-1)
        of_mean = torch.where(kept, self._still, 0).square().sum(-1)
        of_covariance = torch.where(both, self._least, 0).square().sum((-2, -1))
        return (of_mean / smallest + of_covariance / (2 * smallest.square())) / 2

    def _only(self, kept: Tensor, both: Tensor, mean: Tensor, matrix: Tensor) -> Gaussian:
        """The kept outputs; the others become equal and independent, and add no divergence."""
        rest = torch.where(kept, 0, self._sampled.amax(-1, keepdim=True))
        matrix = torch.where(both, matrix, 0) + torch.diag_embed(rest)
        return Gaussian(torch.where(kept, mean, 0), matrix, validate_args=False).to(
            self.truth.dtype
        )

    def _chance(self, doubt: float) -> float:
        """Of an event that none of the samples shows with the probability of the doubt, at most.

        A Gaussian that is cut off there, above its mean, has a mean that is lower by less than this
        chance, in standard deviations, and a variance that is smaller by less than twice the share.
        """
        return min(1.0, -math.log(doubt) / self._samples)

    def _unseen(self, doubt: float) -> Tensor:
        """Which outputs never varied in the samples, and surely would have, by the method.

        P(x != c) >= (mean - c)^2 / (variance + (mean - c)^2)           (Paley & Zygmund 1932)
        """
        apart = (self._shift.abs() - self._still).clamp(min=0).square()
        total = self._variance + apart
        chance = torch.where(total > 0, apart / torch.where(total > 0, total, 1), 0)
        return ~self._seen & (self._samples * chance > -math.log(doubt))

    @property
    def _constant(self) -> Tensor:
        """Which never varied and have the very mean that the method says, but with a variance.

        A unit that is rarely active to one side has another mean, so this one is not just rare,
        unless the variance is so small that the difference of the means may be lost in rounding.
        """
        resolved = math.sqrt(torch.finfo(self.truth.dtype).eps) * self._mean.square()
        centred = self._shift.abs() <= self._still
        return ~self._seen & centred & (self._variance > resolved) & (self._variance > 0)

    def _wide(self, tests: int, relative: Tensor) -> Tensor:
        """Standard errors that are allowed, for a moment with this relative error."""
        z = allowed_errors(TESTS * tests)
        return z + SKEW * z**2 * torch.where(torch.isfinite(relative), relative, 1)

    @property
    def _samples(self) -> int:
        assert self.truth.samples is not None
        return self.truth.samples

    @property
    def _mean(self) -> Tensor:
        return _flat(self.truth, self.truth.mean)

    @property
    def _shift(self) -> Tensor:
        return _flat(self.found, self.found.mean) - self._mean

    @cached_property
    def _matrix(self) -> Tensor:
        return self.truth.covariance_matrix.double()

    @cached_property
    def _ours(self) -> Tensor:
        return self.found.covariance_matrix.double()

    @cached_property
    def _spread(self) -> Tensor:
        assert self.truth.covariance_stderr is not None
        return self.truth.covariance_stderr.double()

    @property
    def _sampled(self) -> Tensor:
        return self._matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    @property
    def _variance(self) -> Tensor:
        return self._ours.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    @property
    def _seen(self) -> Tensor:
        """Which outputs varied, by more than what has no square, and so no standard error."""
        return self._sampled > self._still.square().clamp(min=TINY)

    @property
    def _relative(self) -> Tensor:
        """The standard error of a sampled variance over it; its inverse square counts samples."""
        stderr = self._spread.diagonal(dim1=-2, dim2=-1)
        relative = stderr / torch.where(self._seen, self._sampled, 1)
        # A handful of samples may seem to know it, and two always do.
        return torch.where(self._seen, relative.clamp(min=1 / self._samples), math.inf)

    @property
    def _growth(self) -> Tensor:
        """By how much the method's standard deviation is above the sampled one, at least 1."""
        ratio = self._variance / torch.where(self._seen, self._sampled, 1)
        return torch.where(self._seen, ratio, 1).clamp(min=1).sqrt()

    @property
    def _still(self) -> Tensor:
        """What rounding may do to a mean."""
        return ROUNDING * torch.finfo(self.truth.dtype).eps * self._mean.abs()

    @property
    def _least(self) -> Tensor:
        """What rounding may do to a covariance."""
        scale, still = self._sampled.sqrt(), self._still
        rounding = ROUNDING * torch.finfo(self.truth.dtype).eps
        return rounding * _pairs(torch.mul, scale, scale) + _pairs(torch.mul, still, still)


def allowed_errors(tests: int) -> float:
    """Standard errors beyond which any of so many figures is off with the probability DOUBT."""
    return -NormalDist().inv_cdf(DOUBT / 2 / max(1, tests))


def rank(values: Tensor, dtype: torch.dtype) -> Tensor:
    """How many eigenvalues, in ascending order, are more than rounding."""
    return (values > torch.finfo(dtype).eps * values.shape[-1] * values[..., -1:]).sum(-1)


def _pairs(function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Of every two outputs, (*batch, n, n)."""
    return function(left[..., :, None], right[..., None, :])


def _flat(x: Gaussian, values: Tensor | None) -> Tensor:
    """(*batch, n) in float64."""
    assert values is not None
    return values.double().reshape(*x.batch_shape, x.event_shape.numel())


def _largest(values: Tensor) -> float:
    """An output that should not vary is infinitely off."""
    return float(values.abs().nan_to_num(nan=math.inf).max())
