"""How far moments may be off: standard errors of samples, and estimates for everything else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

STANDARD_ERRORS = 2.4
"""Within so many, 19 of 20 errors are: of eight sets of points, by Student's distribution."""
ROUNDINGS = 1.0
"""Last bits by which the mean of evaluations is off, beside what last bits of the input
change: 98 % of 371 outputs of networks in float32 were within both."""
SHOWN = 1e-6
"""The smallest error that is printed: a few last bits of float32."""


@final
@dataclass(frozen=True)
class SamplingError:
    """Standard errors of moments that come from samples."""

    samples: int
    mean: Tensor
    """(*batch, *event)"""
    covariance: Tensor
    """(*batch, n, n)"""
    heavy_tailed: Tensor | None = None
    """Where a few samples have most of a variance, so that it may be anything, (*batch, *event)."""

    def marginal(self, shape: Sequence[int], index: Tensor) -> "SamplingError":
        """That of some elements; shape: of the mean with a flattened event, (*batch, n)."""
        rows, tails = self.covariance[..., index[:, None], index], self.heavy_tailed
        tails = None if tails is None else tails.reshape(shape)[..., index]
        return SamplingError(self.samples, self.mean.reshape(shape)[..., index], rows, tails)

    def map(self, function: Callable[[Tensor], Tensor]) -> "SamplingError":
        """Apply a function to the tensors inside."""
        tails = None if self.heavy_tailed is None else function(self.heavy_tailed)
        return SamplingError(self.samples, function(self.mean), function(self.covariance), tails)

    def likely(self, mean: Tensor, stddev: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of means and of standard deviations that are rarely exceeded, in float64.

        With the rounding of the mean (*batch, *event) in its dtype.
        """
        rounding = ROUNDINGS * torch.finfo(mean.dtype).eps * mean.detach().double().abs()
        variance = self.covariance.detach().double().diagonal(dim1=-2, dim2=-1)
        of_stddev = quotient(variance.reshape(mean.shape), 2 * stddev.detach().double())
        if self.heavy_tailed is not None:
            of_stddev = torch.where(self.heavy_tailed > 0, torch.inf, of_stddev)
        of_mean = self.mean.detach().double()
        return STANDARD_ERRORS * of_mean + rounding, STANDARD_ERRORS * of_stddev + rounding

    def estimate(
        self, mean: Tensor, stddev: Tensor, rounding: Tensor | float = 0.0
    ) -> "ErrorEstimate":
        """The error of a result that comes from samples alone.

        An output that is the same in all samples may vary beyond them: nothing is known of its
        error. rounding: that of evaluations, in the shape of the mean.
        """
        of_mean, of_stddev = self.likely(mean, stddev)
        unknown = torch.zeros_like(of_mean).masked_fill_(stddev <= 0, torch.inf)
        scale = stddev.detach().double()
        basis = f"from the spread of {self.samples:,} evaluations"
        if self.heavy_tailed is not None and bool(self.heavy_tailed.any()):
            basis += ", of which a few have most of a variance: more would change it"
        return ErrorEstimate(
            quotient(of_mean + rounding, scale) + unknown,
            quotient(of_stddev + rounding, scale) + unknown,
            basis,
        )


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 / 0 = 0, and infinite where something is divided by nothing."""
    if bool((denominator > 0).all()):  # as nearly always, in a fifth of the time
        return numerator / denominator
    safe = torch.where(denominator > 0, denominator, 1)
    nothing = torch.where(numerator > 0, torch.inf, 0.0).to(numerator)
    return torch.where(denominator > 0, numerator / safe, nothing)


@final
@dataclass(frozen=True)
class ErrorEstimate:
    """How far means and standard deviations may be off: 92 to 94 % of errors were smaller.

    `print` shows the largest of each, and the basis.

    Args:
        mean: Errors of the means, in standard deviations.
        stddev: Relative errors of the standard deviations.
        basis: What the estimate is based on, in a few words.

    Example:
        y = cp.propagate(model, x)
        y.error.stddev.max()
        print(y.error)
    """

    mean: Tensor
    stddev: Tensor
    basis: str

    @property
    def largest_mean(self) -> float:
        """The largest error of a mean, in standard deviations."""
        return float(self.mean.max()) if self.mean.numel() else 0.0

    @property
    def largest_stddev(self) -> float:
        """The largest relative error of a standard deviation."""
        return float(self.stddev.max()) if self.stddev.numel() else 0.0

    @property
    def largest(self) -> float:
        """The larger of both, NaN where one is not known."""
        both = self.largest_mean, self.largest_stddev
        return math.nan if any(map(math.isnan, both)) else max(both)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ErrorEstimate":
        """Apply a function to the tensors inside."""
        return ErrorEstimate(function(self.mean), function(self.stddev), self.basis)

    def __str__(self) -> str:
        """Two lines: the largest errors, and the basis."""
        return f"{self._largest_errors()}\n({self.basis})"

    @property
    def sentence(self) -> str:
        """What is printed, on one line."""
        return f"{self._largest_errors()} ({self.basis})"

    def _largest_errors(self) -> str:
        mean, stddev = max(self.largest_mean, SHOWN), max(self.largest_stddev, SHOWN)
        if math.isnan(mean) and math.isnan(stddev):
            return "estimated error: not known"
        return (
            f"estimated error: means up to {in_deviations(mean)}, standard deviations up to "
            f"{in_percent(stddev)}"
        )


@final
@dataclass(eq=False)
class Deferred:
    """An error that is estimated when it is first asked for.

    needs_model: whether that takes evaluations of the model.
    """

    estimate: Callable[[], ErrorEstimate | None]
    needs_model: bool = True

    @cached_property
    def value(self) -> ErrorEstimate | None:
        """The estimate, which is computed once."""
        return self.estimate()

    @property
    def known(self) -> bool:
        """Whether it has been asked for, or takes nothing but a few numbers."""
        return "value" in vars(self) or not self.needs_model

    def map(self, function: Callable[[Tensor], Tensor]) -> "Deferred":
        """Apply a function to the tensors inside, when the error is asked for."""
        return Deferred(
            lambda: None if self.value is None else self.value.map(function), self.needs_model
        )


class Accuracy:
    """The accuracy of a result: its notes, its estimated error and its standard errors."""

    __slots__ = ()

    _sampling: SamplingError | None
    _notes: tuple[str, ...]
    _error: ErrorEstimate | Deferred | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the method did, and what it could not do."""
        return self._notes

    @property
    def error(self) -> ErrorEstimate | None:
        """How far means and standard deviations may be off, or None.

        The default, `cp.Auto`, and sampling methods set it. For other layerwise methods it is
        computed when you first ask for it, with the model in the mode of the call; it is None if
        the weights have changed since. Ask before you pickle such a result, because the copy has no
        model.
        """
        return self._error.value if isinstance(self._error, Deferred) else self._error

    @property
    def sampling_error(self) -> SamplingError | None:
        """Standard errors, if it was sampled."""
        return self._sampling

    @property
    def samples(self) -> int | None:
        """The number of samples, or None."""
        return None if self._sampling is None else self._sampling.samples

    @property
    def mean_stderr(self) -> Tensor | None:
        """Standard errors of the mean, in its shape, if it was sampled."""
        return None if self._sampling is None else self._sampling.mean

    @property
    def covariance_stderr(self) -> Tensor | None:
        """Standard errors of the covariance (*batch, n, n), if it was sampled."""
        return None if self._sampling is None else self._sampling.covariance

    def __str__(self) -> str:
        """Shapes and types, and the estimated error on a line of its own where it is known."""
        known = not isinstance(self._error, Deferred) or self._error.known
        return f"{self!r}\n{self.error}" if known and self.error is not None else repr(self)


def in_deviations(share: float) -> str:
    """An error of a mean: 1.2 % of a standard deviation, 3.1 standard deviations."""
    if share < 1:
        return f"{in_percent(share)} of a standard deviation"
    return f"{share:.2g} standard deviations"


def in_percent(share: float) -> str:
    """A share in two digits: 0.034 %, 1.2 %, 12 %, beyond 1,000 % a factor."""
    if share == 0:
        return "0 %"
    if share < SHOWN:
        return "0.0001 %"
    if share >= 10:  # noqa: PLR2004
        return "a factor of 10 or more" if share == float("inf") else f"a factor of {share:.2g}"
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
