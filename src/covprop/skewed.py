"""Inputs with independent elements that are not symmetric: sensor counts, delays, contents."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from covprop.covariance import Diagonal
from covprop.covariance.base import is_finite
from covprop.distribution import checked_shape
from covprop.errors import InvalidGaussian, UnsupportedOperation, positional_deprecated
from covprop.gaussian import Gaussian
from covprop.kernels import pearson
from covprop.kernels.normal import standard_deviation
from covprop.validation import SUPPORTED, check_batch_dims, check_tensors, checked_variances

Number = float | Tensor


@final
class Skewed(Gaussian):
    """Independent elements with a mean, a variance and a skewness.

    Use it in place of `cp.Gaussian` for inputs that are not symmetric. `cp.Cumulants` and sampling
    use the skewness; other methods warn that they do not. `sample`, `cdf`, `icdf` and `interval`
    use the Pearson type III distribution (a shifted gamma distribution) with these three moments.

    Args:
        mean: A tensor of float32 or float64.
        stddev: Standard deviations, in the shape of the mean.
        variance: Variances, in place of stddev.
        skewness: E[(x - E x)^3] / stddev^3, a number, or a tensor in the shape of the mean; zero
            where the variance is zero.
        batch_dims: How many leading dimensions of the mean are a batch.

    Raises:
        InvalidGaussian: Where shapes, dtypes or values do not describe such elements.

    Example:
        x = cp.Skewed(torch.zeros(3), stddev=torch.ones(3), skewness=torch.tensor([0.0, 0.5, -1.0]))
        x.interval(0.9)
    """

    __slots__ = ()

    @positional_deprecated("variance", "skewness", "batch_dims")
    def __init__(
        self,
        mean: Tensor,
        *,
        stddev: Tensor | None = None,
        variance: Tensor | None = None,
        skewness: Number,
        batch_dims: int = 0,
    ) -> None:
        """Check and keep."""
        check_tensors(mean, mean)
        check_batch_dims(mean, batch_dims)
        values = checked_variances(mean, stddev, variance)
        if not isinstance(skewness, Tensor):
            skewness = torch.full_like(mean, skewness)
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        known = torch.where(values > 0, skewness, 0) if skewness.shape == mean.shape else skewness
        super().__init__(mean, Diagonal(values.reshape(*batch, size)), skewness=known)

    @classmethod
    def triangular(cls, low: Number, mode: Number, high: Number, batch_dims: int = 0) -> "Skewed":
        """Elements with a triangular density, from low over its peak at the mode to high.

        Args:
            low: The smallest value, a number or a tensor.
            mode: The most likely one.
            high: The largest one.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.triangular(torch.zeros(3), 0.2, 1.0)
        """
        low, mode, high = _tensors(low=low, mode=mode, high=high)
        if bool(((mode < low) | (high < mode)).any()):
            raise InvalidGaussian("a triangular distribution has low <= mode <= high")
        rise, fall = mode.double() - low, high.double() - mode
        width = rise + fall
        place = rise / torch.where(width > 0, width, 1)  # of the mode, from 0 to 1
        spread = 1 - place + place.square()
        return cls._of(
            mode,
            low + (2 * rise + fall) / 3,
            width.square() * spread / 18,
            math.sqrt(2) * (1 - 2 * place) * (1 + place) * (2 - place) / (5 * spread**1.5),
            batch_dims,
        )

    @classmethod
    def uniform(cls, low: Number, high: Number, batch_dims: int = 0) -> "Skewed":
        """Elements with a uniform density between two numbers, without skewness.

        Args:
            low: The smallest value, a number or a tensor.
            high: The largest one.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.uniform(torch.zeros(3), 1.0)
        """
        low, high = _tensors(low=low, high=high)
        if bool((high < low).any()):
            raise InvalidGaussian("a uniform distribution has low <= high")
        width = high.double() - low
        return cls._of(
            low, low + width / 2, width.square() / 12, torch.zeros_like(width), batch_dims
        )

    @classmethod
    @positional_deprecated("stddev", "batch_dims")
    def log_normal(
        cls,
        mean: Number,
        *,
        stddev: Number | None = None,
        variance: Number | None = None,
        batch_dims: int = 0,
    ) -> "Skewed":
        """Elements whose logarithm is normal.

        Args:
            mean: Of the elements themselves, not of their logarithms; positive.
            stddev: Of the elements themselves.
            variance: Their variance, in place of stddev.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.log_normal(torch.ones(3), stddev=0.3)
        """
        mean, square = _positive("a log-normal distribution", mean, stddev, variance)
        ratio = standard_deviation(square) / mean
        return cls._of(mean, mean, square, ratio * (3 + ratio.square()), batch_dims)

    @classmethod
    @positional_deprecated("stddev", "batch_dims")
    def gamma(
        cls,
        mean: Number,
        *,
        stddev: Number | None = None,
        variance: Number | None = None,
        batch_dims: int = 0,
    ) -> "Skewed":
        """Elements with a gamma distribution, which `sample` draws from exactly.

        Args:
            mean: Of the elements; positive.
            stddev: Of the elements.
            variance: Their variance, in place of stddev.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.gamma(torch.ones(3), stddev=0.3)
        """
        mean, square = _positive("a gamma distribution", mean, stddev, variance)
        return cls._of(mean, mean, square, 2 * standard_deviation(square) / mean, batch_dims)

    @classmethod
    def poisson(
        cls, rate: Number, gain: Number = 1.0, read_noise: Number = 0.0, batch_dims: int = 0
    ) -> "Skewed":
        """Counts of photons: gain times a Poisson variable, and independent Gaussian noise.

        Args:
            rate: The expected counts; not negative.
            gain: The value of one count.
            read_noise: The standard deviation of the Gaussian noise.
            batch_dims: How many leading dimensions are a batch.

        Example:
            image = torch.rand(28, 28)
            cp.Skewed.poisson(50 * image, gain=1 / 50, read_noise=0.01)
        """
        rate, gain, noise = _tensors(rate=rate, gain=gain, read_noise=read_noise)
        if bool((rate < 0).any()):
            raise InvalidGaussian("the rate of a Poisson distribution cannot be negative")
        if bool((noise < 0).any()):
            raise InvalidGaussian("read_noise is a standard deviation, and cannot be negative")
        counts, factor = rate.double(), gain.double()
        shot = factor.square() * counts
        variance = shot + noise.double().square()
        varies = shot > 0
        share = torch.where(varies, shot / torch.where(varies, variance, 1), 0)
        skewness = share * (share / torch.where(varies, counts, 1)).sqrt()
        skewness = torch.where(varies, factor.sign() * skewness, 0)
        return cls._of(rate, factor * counts, variance, skewness, batch_dims)

    @classmethod
    def _of(
        cls, like: Tensor, mean: Tensor, variance: Tensor, skewness: Tensor, batch_dims: int
    ) -> "Skewed":
        mean, variance, skewness = (part.to(like.dtype) for part in (mean, variance, skewness))
        return cls(mean, variance=variance, skewness=skewness, batch_dims=batch_dims)

    @property
    def skewness(self) -> Tensor:
        """Normalised third central moments of the elements, in the shape of the mean."""
        assert self._skewness is not None
        return self._skewness

    def rsample(
        self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw samples of Pearson's type III with the three moments, with gradients.

        Gradients are those of mean and variance; the skewness counts as a constant.

        Args:
            sample_shape: The number of samples, or a shape; by default one sample.
            generator: A random generator, by default torch's global one.

        Example:
            cp.Skewed.gamma(torch.ones(3), stddev=0.3).rsample((10,))
        """
        shape = checked_shape(sample_shape)
        numbers = pearson.draw(self.skewness, shape.numel(), generator).to(self.dtype)
        draws = self.mean + standard_deviation(self.variance) * numbers
        return draws.reshape(*shape, *self.mean.shape)

    def condition(
        self, elements: Any, value: Tensor, noise: float | Tensor | None = None, **named: Any
    ) -> Gaussian:
        """The other elements, unchanged, as all elements are independent."""
        super().condition(elements, value, noise, **named)  # which checks the arguments
        seen = set(self._elements(elements).tolist())
        return self.marginal([i for i in range(self.event_shape.numel()) if i not in seen])

    def to_torch(self) -> Distribution:
        """Refused unless nothing is skewed: torch has no such distribution."""
        if bool((self.skewness != 0).any()):
            raise UnsupportedOperation(
                "torch has no distribution with this skewness; for a normal one with the same mean "
                "and variance use cp.Gaussian.diagonal(x.mean, variance=x.variance)"
            )
        return super().to_torch()


def _tensors(**named: Number) -> list[Tensor]:
    """Numbers and tensors as tensors of one shape, dtype and device."""
    given = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not given:
        raise InvalidGaussian(
            f"one of {', '.join(named)} must be a tensor, which says how many elements there are"
        )
    first, like = next(iter(given.items()))
    for name, value in given.items():
        if value.dtype not in SUPPORTED:
            raise InvalidGaussian(
                f"{name} has dtype {value.dtype}; covprop computes in float32 or float64, so "
                "convert it with .float() or .double()"
            )
        if (value.dtype, value.device) != (like.dtype, like.device):
            raise InvalidGaussian(
                f"{first} is {like.dtype} on {like.device} and {name} {value.dtype} on "
                f"{value.device}; convert one"
            )
    tensors = [
        torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in named.values()
    ]
    for name, tensor in zip(named, tensors, strict=True):
        if not is_finite(tensor):
            raise InvalidGaussian(f"{name} has NaN or infinite entries")
    try:
        return list(torch.broadcast_tensors(*tensors))
    except RuntimeError as error:
        both = zip(named, tensors, strict=True)
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in both)
        raise InvalidGaussian(f"shapes do not broadcast with each other: {shapes}") from error


def _positive(
    what: str, mean: Number, stddev: Number | None, variance: Number | None
) -> tuple[Tensor, Tensor]:
    """A positive mean, and variances in float64, from whichever of the two is given."""
    if (stddev is None) == (variance is None):
        raise InvalidGaussian("give the noise as stddev=... or as variance=..., one of them")
    if stddev is not None:
        mean, width = _tensors(mean=mean, stddev=stddev)
        square = width.double().square()
    else:
        assert variance is not None
        mean, width = _tensors(mean=mean, variance=variance)
        square = width.double()
    if bool((mean <= 0).any()):
        raise InvalidGaussian(f"{what} has a positive mean")
    if bool((width < 0).any()):
        name = "variance" if stddev is None else "standard deviation"
        raise InvalidGaussian(f"a {name} cannot be negative")
    return mean, square
