"""Inputs with independent elements that are not symmetric: sensor counts, delays, contents."""

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from covprop.covariance import Diagonal
from covprop.errors import InvalidGaussian, UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.kernels import pearson
from covprop.kernels.normal import is_finite, standard_deviation
from covprop.validation import SUPPORTED, check_batch_dims, check_tensors

Number = float | Tensor


@final
class Skewed(Gaussian):
    """Independent elements of which mean, variance and skewness are known.

    The companion of `cp.Gaussian` for inputs that are not symmetric: `cp.Cumulants` and sampling
    use the skewness, and other methods say that they do not. What counts are the first three
    moments; `sample`, `cdf`, `icdf` and `interval` are those of Pearson's type III, a shifted gamma
    distribution, that has them.

    Args:
        mean: A tensor of float32 or float64.
        variance: In the shape of the mean.
        skewness: E[(x - E x)^3] / stddev^3, a number for all or a tensor in the shape of the mean;
            where the variance is zero it is taken as zero.
        batch_dims: How many leading dimensions of the mean are a batch.

    Raises:
        InvalidGaussian: Where shapes, dtypes or values do not describe such elements.

    Example:
        x = cp.Skewed(torch.zeros(3), torch.ones(3), torch.tensor([0.0, 0.5, -1.0]))
        x.interval(0.9)
    """

    __slots__ = ()

    def __init__(
        self, mean: Tensor, variance: Tensor, skewness: Number, batch_dims: int = 0
    ) -> None:
        """Check and keep."""
        check_tensors(mean, variance)
        check_batch_dims(mean, batch_dims)
        if variance.shape != mean.shape:
            raise InvalidGaussian(
                f"variances have the shape of the mean {tuple(mean.shape)}, not "
                f"{tuple(variance.shape)}"
            )
        if not isinstance(skewness, Tensor):
            skewness = torch.full_like(mean, skewness)
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        known = torch.where(variance > 0, skewness, 0) if skewness.shape == mean.shape else skewness
        super().__init__(mean, Diagonal(variance.reshape(*batch, size)), skewness=known)

    @classmethod
    def triangular(cls, low: Number, mode: Number, high: Number, batch_dims: int = 0) -> "Skewed":
        """Elements with a triangular density, from low over its peak at the mode to high.

        Args:
            low: The least value, a number or a tensor.
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
        """Elements that are equally likely anywhere between two numbers; they have no skewness.

        Args:
            low: The least value, a number or a tensor.
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
    def log_normal(cls, mean: Number, stddev: Number, batch_dims: int = 0) -> "Skewed":
        """Elements whose logarithm is normal.

        Args:
            mean: Of the elements themselves, not of their logarithms; positive.
            stddev: Of the elements themselves.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.log_normal(torch.ones(3), 0.3)
        """
        mean, stddev = _positive("a log-normal distribution", mean, stddev)
        ratio = stddev.double() / mean
        skewness = ratio * (3 + ratio.square())
        return cls._of(mean, mean, stddev.double().square(), skewness, batch_dims)

    @classmethod
    def gamma(cls, mean: Number, stddev: Number, batch_dims: int = 0) -> "Skewed":
        """Elements with a gamma distribution, which `sample` draws from exactly.

        Args:
            mean: Of the elements; positive.
            stddev: Of the elements.
            batch_dims: How many leading dimensions are a batch.

        Example:
            cp.Skewed.gamma(torch.ones(3), 0.3)
        """
        mean, stddev = _positive("a gamma distribution", mean, stddev)
        skewness = 2 * stddev.double() / mean
        return cls._of(mean, mean, stddev.double().square(), skewness, batch_dims)

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
        return cls(mean, variance, skewness, batch_dims)

    @property
    def skewness(self) -> Tensor:
        """Normalised third central moments of the elements, in the shape of the mean."""
        assert self._skewness is not None
        return self._skewness

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw samples `(count, *batch, *event)` of Pearson's type III with the three moments.

        Gradients are those of mean and variance; the skewness is a constant to them.
        """
        numbers = pearson.draw(self.skewness, count, generator).to(self.dtype)
        return self.mean + standard_deviation(self.variance) * numbers

    def condition(
        self, elements: Any, value: Tensor, noise: float | Tensor | None = None
    ) -> Gaussian:
        """The other elements, of which independent ones tell nothing."""
        super().condition(elements, value, noise)  # which checks the arguments
        seen = set(self._elements(elements).tolist())
        return self.marginal([i for i in range(self.event_shape.numel()) if i not in seen])

    def to_torch(self) -> Distribution:
        """Refused unless nothing is skewed: torch has no such distribution."""
        if bool((self.skewness != 0).any()):
            raise UnsupportedOperation(
                "torch has no distribution with this skewness; for a normal one with the same mean "
                "and variance use cp.Gaussian.diagonal(x.mean, x.variance).to_torch()"
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


def _positive(what: str, mean: Number, stddev: Number) -> list[Tensor]:
    mean, stddev = _tensors(mean=mean, stddev=stddev)
    if bool((mean <= 0).any()):
        raise InvalidGaussian(f"{what} has a positive mean")
    if bool((stddev < 0).any()):
        raise InvalidGaussian("a standard deviation cannot be negative")
    return [mean, stddev]


def is_skewed(x: Gaussian, beyond: float = 0.0) -> bool:
    """Whether a skewness is known of some element, and beyond so much."""
    return x.skewness is not None and bool((x.skewness.abs() > beyond).any())
