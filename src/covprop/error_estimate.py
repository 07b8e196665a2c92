"""How far moments may be off: standard errors of samples, and estimates for everything else."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class SamplingError:
    """Standard errors of moments that come from samples."""

    samples: int
    mean: Tensor
    """(*batch, *event)"""
    covariance: Tensor
    """(*batch, n, n)"""

    def map(self, function: Callable[[Tensor], Tensor]) -> "SamplingError":
        """Apply a function to the tensors inside."""
        return SamplingError(self.samples, function(self.mean), function(self.covariance))


@final
@dataclass(frozen=True)
class ErrorEstimate:
    """How far means and standard deviations may be off: 84 to 90 % of errors were smaller.

    Printed, it is one line with the largest of each.

    Args:
        mean: Errors of the means in standard deviations, in the shape of the mean.
        stddev: Relative errors of the standard deviations, in the shape of the mean.
        basis: What the estimate is from, in a few words.

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
        """One line."""
        return (
            f"estimated error: means up to {in_deviations(self.largest_mean)}, standard "
            f"deviations up to {in_percent(self.largest_stddev)} ({self.basis})"
        )


@final
class Deferred:
    """An error that is estimated when it is first asked for."""

    def __init__(self, estimate: Callable[[], ErrorEstimate | None]) -> None:
        """Keep the function, and call it once at most."""
        self._estimate = estimate

    @cached_property
    def value(self) -> ErrorEstimate | None:
        """The estimate."""
        return self._estimate()

    @property
    def known(self) -> bool:
        """Whether it has been asked for."""
        return "value" in vars(self)


class Accuracy:
    """What a result tells of its own accuracy."""

    __slots__ = ()

    _sampling: SamplingError | None
    _notes: tuple[str, ...]
    _error: ErrorEstimate | Deferred | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the method did, and where it could not do what was asked, in sentences."""
        return self._notes

    @property
    def error(self) -> ErrorEstimate | None:
        """How far means and standard deviations may be off, None where nothing is known of it.

        Results of `cp.Auto`, the default, have it. For those of other methods that go from layer to
        layer it is computed when it is first asked for, with the model as it is then.
        """
        return self._error.value if isinstance(self._error, Deferred) else self._error

    @property
    def sampling_error(self) -> SamplingError | None:
        """How far it may be off, if it was sampled."""
        return self._sampling

    @property
    def samples(self) -> int | None:
        """How many samples were taken for it, else None."""
        return None if self._sampling is None else self._sampling.samples

    @property
    def mean_stderr(self) -> Tensor | None:
        """Standard errors of the mean, in its shape, if it was sampled."""
        return None if self._sampling is None else self._sampling.mean

    @property
    def covariance_stderr(self) -> Tensor | None:
        """Standard errors of the covariance (*batch, n, n), if it was sampled."""
        return None if self._sampling is None else self._sampling.covariance

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ErrorEstimate | Deferred | None:
        """The error with a function applied to its tensors, computed no sooner than the error."""
        deferred = self._error
        if not isinstance(deferred, Deferred):
            return None if deferred is None else deferred.map(function)
        return Deferred(lambda: None if deferred.value is None else deferred.value.map(function))

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
    if share < 1e-6:  # noqa: PLR2004
        return "0.0001 %"
    if share >= 10:  # noqa: PLR2004
        return "a factor of 10 or more" if share == float("inf") else f"a factor of {share:.2g}"
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
