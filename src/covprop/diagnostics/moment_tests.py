"""Tests of a method's moments against sampled ones."""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from covprop.diagnostics.verdict import (
    SIGNIFICANCE,
    Deviation,
    Judgement,
    allowed_errors,
    flat,
    kl_divergence,
)
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import MOMENT

TESTS = 3  # that share it: of the means, of the covariances, and of all moments jointly
RARE = 0.1  # relative standard error of a sampled variance from which an output is rarely active
UNRELIABLE = 0.2  # the same error from which an output is left out of the divergence
TINY = math.sqrt(torch.finfo(torch.float64).tiny)  # variance whose standard error underflows
KINK = 2.0  # how much more an unsampled kink may change a variance than a mean, at most
SKEW = 0.5  # widening of an interval by skewness, in units of z^2 times the relative error


@final
class MomentTests:
    """A method's Gaussian against a sampled one, in float64, with flattened outputs.

    The standard errors that samples give of a rarely active unit are themselves uncertain, and
    smallest where the estimate is most wrong. So they are taken at the larger of the sampled and
    the method's variance, and the skewness of the estimate (at most its relative error for a mean,
    by Pearson's inequality) widens what a normal distribution allows. An event that no sample shows
    has no standard error: with a control variate only distant kinks are left, and samples may have
    met none of them.
    """

    def __init__(self, result: Gaussian, truth: Gaussian) -> None:
        error = truth.sampling_error
        assert error is not None
        self.samples, self.dtype = error.samples, truth.dtype
        self.mean_stderr = flat(truth, error.mean)  # (*batch, n)
        self.covariance_stderr = error.covariance.double()  # (*batch, n, n)
        self.sampled_mean = flat(truth, truth.mean)
        self.shift = flat(result, result.mean) - self.sampled_mean
        self.covariance = result.covariance_matrix.double()
        self.sampled_covariance = truth.covariance_matrix.double()
        self.variance, self.sampled_variance = (
            _diagonal(matrix).clamp(min=0) for matrix in (self.covariance, self.sampled_covariance)
        )
        self.rounding = MOMENT * torch.finfo(self.dtype).eps
        self.mean_rounding = self.rounding * self.sampled_mean.abs()
        self.covariance_rounding = self.rounding * _pairs(
            torch.mul, self.sampled_variance.sqrt()
        ) + _pairs(torch.mul, self.mean_rounding)
        self.varied = self.sampled_variance > self.mean_rounding.square().clamp(min=TINY)
        divisor = torch.where(self.varied, self.sampled_variance, 1)
        # A handful of samples may seem to have no error, and two never have one.
        relative = (_diagonal(self.covariance_stderr) / divisor).clamp(min=1 / self.samples)
        self.relative_stderr = torch.where(self.varied, relative, math.inf)  # of variances
        ratio = torch.where(self.varied, self.variance / divisor, 1)
        self.growth = ratio.clamp(min=1).sqrt()  # of the standard deviation, by the method

    def judgement(
        self, mean_error: Tensor, variance_ratio: Tensor, covariance_error: Tensor
    ) -> Judgement:
        """The largest errors, and whether sampling explains them, one by one or else jointly."""
        in_mean, in_covariance = self.in_mean(), self.in_covariance()
        in_variance = _diagonal(in_covariance)
        difference = (self.covariance - self.sampled_covariance).abs()
        stderr = self.covariance_stderr * _pairs(torch.mul, self.growth)
        errors = _standard_errors(difference, stderr, self.covariance_rounding)
        stddev = _worst(
            (variance_ratio.clamp(min=0).sqrt() - 1).reshape(in_mean.shape),
            _diagonal(errors), in_variance,
        )  # fmt: skip
        shifts = _standard_errors(
            self.shift.abs(), self.mean_stderr * self.growth, self.mean_rounding
        )
        mean = _worst(mean_error.reshape(in_mean.shape), shifts, in_mean)
        beyond_variances = in_covariance & ~torch.diag_embed(in_variance)
        largest = torch.where(
            beyond_variances | ~beyond_variances.any(-1, True).any(-2, True), errors, 0
        ).amax((-2, -1))
        covariance = _worst(covariance_error, largest, beyond_variances.any(-1).any(-1))
        if stddev.significant or mean.significant or covariance.significant:
            return Judgement(stddev, mean, covariance)
        times, significant = self.jointly()
        worst = float(times[significant].max()) if bool(significant.any()) else math.nan
        return Judgement(stddev, mean, covariance, worst)

    def in_mean(self) -> Tensor:
        """Which means differ significantly, (*batch, n).

        Without assumptions on the distribution, |mean - sampled mean| exceeds
        sqrt(variance / (N p)) with a probability of at most p (Chebyshev).
        """
        size = self.shift.abs()
        p = _shared(size)
        missed = self._missed(p) * self.sampled_variance.sqrt() * self.growth
        allowed = self.mean_stderr * self.growth * self._allowed(self.relative_stderr) + missed
        beyond = self.varied & (size > allowed) & (size > self.mean_rounding)
        impossible = size > (self.variance / (self.samples * p)).sqrt() + self.mean_rounding
        return beyond | impossible | self._should_vary(p)

    def in_covariance(self) -> Tensor:
        """Which covariances differ significantly, (*batch, n, n).

        Their standard error is at least that of independent outputs, sqrt(variances / N), since
        samples tell nothing of what rarely happens to two at once; where a unit is rarely active it
        is the most that those of the variances allow: E[a^2 b^2] <= sqrt(E[a^4] E[b^4]). A sampled
        variance exceeds variance / p with a probability of at most p (Markov).
        """
        difference = (self.covariance - self.sampled_covariance).abs()
        p = _shared(difference)
        relative = self.relative_stderr
        variance = self.sampled_variance * self.growth**2
        most = (relative.square() + 1 / self.samples).sqrt() * variance
        least = (relative / math.sqrt(2)).clamp(max=self.samples**-0.5) * variance
        larger = _pairs(torch.maximum, relative)
        rare = larger > RARE
        _diagonal(rare).fill_(False)
        stderr = self.covariance_stderr * _pairs(torch.mul, self.growth)
        stderr = torch.maximum(stderr, _pairs(torch.mul, least).sqrt())
        bound = torch.maximum(stderr, _pairs(torch.mul, most).sqrt())
        stderr = torch.where(rare, bound, stderr)
        deviation = self.sampled_variance.sqrt() * self.growth
        missed = KINK * self._missed(p) * _pairs(torch.mul, deviation)
        allowed = stderr * self._allowed(larger) + missed + self.covariance_rounding
        beyond = _pairs(torch.logical_and, self.varied) & (difference > allowed)
        rounding = _diagonal(self.covariance_rounding)
        impossible = (self.sampled_variance > self.variance / p + rounding) | self._constant()
        impossible |= self._should_vary(p) & (self.variance > rounding)
        return beyond | torch.diag_embed(impossible)

    def jointly(self) -> tuple[Tensor, Tensor]:
        """Divergences over those of Gaussian samples, and which are significant, (*batch).

        Of N Gaussian samples of rank k, 2 N KL has about a chi-squared distribution with
        k (k + 3) / 2 degrees of freedom; it is divided by the most that any entry of the covariance
        varies more than in Gaussian samples, by the standard errors. Those do not cover
        combinations of outputs that hardly vary, so this is a hint and no proof. Rarely active
        units and rounding errors are left out.
        """
        kept = self.varied & (self.relative_stderr <= UNRELIABLE)
        both = _pairs(torch.logical_and, kept)
        divergence = kl_divergence(
            self._only(kept, both, torch.zeros_like(self.shift), self.sampled_covariance),
            self._only(kept, both, self.shift, self.covariance),
        )
        expected = _pairs(torch.mul, self.sampled_variance) + self.sampled_covariance.square()
        expected = torch.where(both & (expected > 0), expected, math.inf)
        ratio = self.covariance_stderr.square() * self.samples / expected
        values = torch.linalg.eigvalsh(torch.where(both, self.sampled_covariance, 0))
        count = rank(values, self.dtype).double()
        freedom = (count * (count + 3) / 2).clamp(min=1)
        rounding = self._rounding_divergence(values, both, kept)
        statistic = (divergence.sqrt() - rounding.sqrt()).clamp(min=0).square()
        statistic = 2 * self.samples * statistic / ratio.amax((-2, -1)).clamp(min=1)
        finite = torch.isfinite(statistic)
        p = torch.special.gammaincc(freedom / 2, torch.where(finite, statistic, 0) / 2)
        times = divergence / (freedom / (2 * self.samples))
        return times, finite & (p < _shared(p))

    def _rounding_divergence(self, values: Tensor, both: Tensor, kept: Tensor) -> Tensor:
        """At most, to second order: (|dm|^2 / l + |dC|^2 / (2 l^2)) / 2, l the least eigenvalue."""
        rounded = torch.finfo(self.dtype).eps * values.shape[-1] * values[..., -1:]
        smallest = torch.where(values > rounded, values, math.inf).amin(-1)
        of_mean = torch.where(kept, self.mean_rounding, 0).square().sum(-1)
        of_covariance = torch.where(both, self.covariance_rounding, 0).square().sum((-2, -1))
        return (of_mean / smallest + of_covariance / (2 * smallest.square())) / 2

    def _only(self, kept: Tensor, both: Tensor, mean: Tensor, matrix: Tensor) -> Gaussian:
        """The kept outputs; the others become equal and independent, and add no divergence."""
        rest = torch.where(kept, 0, self.sampled_variance.amax(-1, keepdim=True))
        matrix = torch.where(both, matrix, 0) + torch.diag_embed(rest)
        return Gaussian(torch.where(kept, mean, 0), matrix, validate_args=False).to(self.dtype)

    def _missed(self, p: float) -> float:
        """Largest probability of an event that all samples miss with the probability p.

        A Gaussian that is cut off there, above its mean, has a mean that is lower by less than this
        probability, in standard deviations, and a variance that is smaller by less than twice it.
        """
        return min(1.0, -math.log(p) / self.samples)

    def _should_vary(self, p: float) -> Tensor:
        """Which outputs never varied in the samples, and surely would have, by the method.

        P(x != c) >= (mean - c)^2 / (variance + (mean - c)^2)           (Paley & Zygmund 1932)
        """
        square = (self.shift.abs() - self.mean_rounding).clamp(min=0).square()
        total = self.variance + square
        chance = torch.where(total > 0, square / torch.where(total > 0, total, 1), 0)
        return ~self.varied & (self.samples * chance > -math.log(p))

    def _constant(self) -> Tensor:
        """Which outputs never varied and have the method's very mean, but not its variance.

        A unit that is rarely active to one side has another mean, so this one is not just rare,
        unless the variance is so small that the difference of the means may be lost in rounding.
        """
        resolved = math.sqrt(torch.finfo(self.dtype).eps) * self.sampled_mean.square()
        centred = self.shift.abs() <= self.mean_rounding
        other = (self.variance - self.sampled_variance).abs() > self.rounding * self.variance
        return ~self.varied & centred & other & (self.variance > resolved)

    def _allowed(self, relative: Tensor) -> Tensor:
        """Allowed standard errors of moments with these relative standard errors."""
        z = allowed_errors(TESTS * relative.numel())
        return z + SKEW * z**2 * torch.where(torch.isfinite(relative), relative, 1)


def rank(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of eigenvalues, in ascending order, that are more than rounding."""
    return (values > torch.finfo(dtype).eps * values.shape[-1] * values[..., -1:]).sum(-1)


def _shared(tests: Tensor) -> float:
    """The significance of each of so many tests (Bonferroni)."""
    return SIGNIFICANCE / TESTS / max(1, tests.numel())


def _pairs(function: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
    """A function of every two outputs, (*batch, n, n)."""
    return function(values[..., :, None], values[..., None, :])


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _worst(errors: Tensor, standard_errors: Tensor, significant: Tensor) -> Deviation:
    """The largest error of those that are significant, or else of all that are known."""
    found = bool(significant.any())
    # An output that should not vary is infinitely off.
    sizes = errors.abs().nan_to_num(nan=math.inf if found else -1.0, posinf=math.inf)
    sizes = torch.where(significant, sizes, -1.0) if found else sizes
    if not sizes.numel() or float(sizes.max()) < 0:
        return Deviation(math.nan, math.nan, significant=False)
    place = int(sizes.argmax())
    number = float(standard_errors.reshape(-1)[place])
    return Deviation(float(sizes.reshape(-1)[place]), number, found)


def _standard_errors(difference: Tensor, stderr: Tensor, rounded: Tensor) -> Tensor:
    """Differences in standard errors; zero if they are rounding, infinite if there is no error."""
    return torch.where(difference <= rounded, 0, difference / stderr)
