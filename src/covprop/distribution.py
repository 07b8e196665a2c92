"""A mean and a covariance as a distribution, by the names of torch.distributions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution as TorchDistribution
from torch.distributions import (
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
)

from covprop.covariance import Covariance, Diagonal, LowRank
from covprop.errors import InvalidGaussian
from covprop.kernels import normal, pearson
from covprop.kernels.normal import correlation, inverse_deviation, known_deviation
from covprop.plots import MOST_CORRELATED, gaussian_figure


class Distribution(ABC):
    """Moments, shapes, samples and densities, and the distribution function of each element."""

    __slots__ = ()

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The mean."""

    @property
    @abstractmethod
    def skewness(self) -> Tensor | None:
        """Normalised third central moments, in the shape of the mean, if they are known."""

    @property
    @abstractmethod
    def covariance(self) -> Covariance:
        """The covariance in its structure."""

    @property
    def loc(self) -> Tensor:
        """The mean, as torch.distributions calls it."""
        return self.mean

    @property
    def covariance_matrix(self) -> Tensor:
        """The full covariance (*batch, n, n)."""
        return self.covariance.matrix()

    @property
    def variance(self) -> Tensor:
        """Variances, in the shape of the mean."""
        return self.covariance.diagonal().reshape(self.mean.shape)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations, in the shape of the mean; NaN where a variance is negative."""
        return known_deviation(self.covariance.diagonal()).reshape(self.mean.shape)

    @property
    def correlation_matrix(self) -> Tensor:
        """Correlations (*batch, n, n): 1 on the diagonal, 0 for elements that do not vary."""
        inverse = inverse_deviation(self.covariance.diagonal())
        matrix = correlation(self.covariance_matrix, inverse[..., :, None], inverse[..., None, :])
        return torch.diagonal_scatter(matrix, torch.ones_like(inverse), dim1=-2, dim2=-1)

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch."""
        return self.covariance.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        """The shape of one sample."""
        return self.mean.shape[len(self.batch_shape) :]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """The device of mean and covariance."""
        return self.mean.device

    def __len__(self) -> int:
        """The size of the first batch dimension."""
        if not self.batch_shape:
            raise TypeError("a single Gaussian has no length; only a batch does")
        return self.batch_shape[0]

    def __repr__(self) -> str:
        """Shapes and types, no numbers."""
        return (
            f"{type(self).__name__}(batch_shape={tuple(self.batch_shape)}, event_shape="
            f"{tuple(self.event_shape)}, covariance={type(self.covariance).__name__}, "
            f"dtype={self.dtype})"
        )

    def _elements(self, index: Any) -> Tensor:
        """The numbers of some elements of the flattened event, none of them twice."""
        numbers = torch.arange(self.event_shape.numel(), device=self.device)
        chosen: Tensor = numbers[index].reshape(-1)
        if len(chosen.unique()) < len(chosen):
            raise IndexError("an element of the event is named twice")
        return chosen

    def sample(
        self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw samples `(*sample_shape, *batch, *event)`, without gradients.

        The samples are Gaussian, even if a skewness is known. The covariance may be singular.

        Args:
            sample_shape: The number of samples, or a shape; by default one sample.
            generator: A random generator, by default torch's global one.

        Example:
            x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
            x.sample((10,)).shape  # (10, 3)
        """
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def rsample(
        self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw samples like `sample`, with gradients of mean and covariance.

        Args:
            sample_shape: The number of samples, or a shape; by default one sample.
            generator: A random generator, by default torch's global one.

        Example:
            mean = torch.zeros(3, requires_grad=True)
            cp.Gaussian.isotropic(mean, stddev=0.1).rsample((10,)).sum().backward()
        """
        shape = checked_shape(sample_shape)
        noise = self.covariance.noise(shape.numel(), generator)
        return self.mean + noise.reshape(*shape, *self.mean.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of a normal distribution at these values.

        Args:
            value: A tensor `(*sample_shape, *batch, *event)`, or one that broadcasts to it.

        Returns:
            A tensor `(*sample_shape, *batch)`.

        Raises:
            InvalidGaussian: If the covariance is singular, or a shape is wrong.

        Example:
            x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
            x.log_prob(x.sample((10,)))
        """
        value = torch.as_tensor(value, dtype=self.dtype, device=self.device)
        event = self.event_shape
        lead = value.dim() - len(event)
        if lead < 0 or value.shape[lead:] != event or not _fits(value.shape[:lead], self):
            raise InvalidGaussian(
                f"log_prob takes values of shape (*sample_shape, *batch, *event) with the batch "
                f"{tuple(self.batch_shape)} and the event {tuple(event)}, not {tuple(value.shape)}"
            )
        density = self.to_torch()
        return density.log_prob(value.reshape(*value.shape[:lead], *density.event_shape))

    def entropy(self) -> Tensor:
        """The differential entropy `(*batch)` of a normal distribution, in nats.

        Raises:
            InvalidGaussian: If the covariance is singular.

        Example:
            cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1).entropy()
        """
        return self.to_torch().entropy()

    def to_torch(self) -> TorchDistribution:
        """MultivariateNormal over the flattened event, or its low-rank or independent kind.

        Raises:
            InvalidGaussian: If the covariance is singular, so that there is no density.
        """
        return self.covariance.to_torch(self.mean)

    def cdf(self, value: float | Tensor) -> Tensor:
        """The cumulative distribution function of each element, computed in float64.

        It is that of a normal distribution or, if the skewness is known, of a Pearson type III
        distribution (a shifted gamma distribution) with the same three moments. An element that
        does not vary jumps from 0 to 1. Differentiable, with a skewness once only.

        Args:
            value: A number, or a tensor that broadcasts with the mean.

        Example:
            x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.5)
            x.cdf(0.5)  # 0.8413 for each
        """
        mean, stddev, at = self.mean.double(), self.stddev.double(), self._numbers(value)
        varies = stddev != 0  # a NaN stays one
        z = (at - mean) / torch.where(varies, stddev, 1)
        if self.skewness is None:
            below = normal.cumulative(z)
        else:
            below = pearson.cumulative(z, self.skewness)
        return torch.where(varies, below, (at >= mean).double()).to(self.mean.dtype)

    def icdf(self, value: float | Tensor) -> Tensor:
        """The quantile function of each element, the inverse of `cdf`.

        Args:
            value: A probability, or a tensor of them that broadcasts with the mean.

        Example:
            x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.5)
            x.icdf(0.9)  # 0.6408 for each
        """
        probability = self._numbers(value)
        if not bool(((probability >= 0) & (probability <= 1)).all()):
            raise ValueError("icdf takes probabilities, from 0 to 1")
        return self._at(torch.special.ndtri(probability))

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The ends of the central interval of each element.

        Args:
            level: The probability of the interval, between 0 and 1.

        Returns:
            Two tensors in the shape of the mean.

        Example:
            low, high = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.5).interval(0.9)
        """
        if not 0 < level < 1:
            raise ValueError(f"level is a probability between 0 and 1, not {level!r}")
        # In two halves: 1 - level is exact, and (1 + level) / 2 would round the tail away.
        score = torch.special.ndtri(self._numbers((1 - level) / 2))
        return self._at(score), self._at(-score)

    def _numbers(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self.mean.device)

    def _at(self, score: Tensor) -> Tensor:
        """The place of each element that is as likely as this number of a normal one."""
        mean, stddev = self.mean.double(), self.stddev.double()
        z = score if self.skewness is None else pearson.quantile(score, self.skewness)
        varies = stddev != 0
        # An infinite end of what does not vary would be no number.
        moved = torch.where(varies, z, 0) * torch.where(varies, stddev, 0)
        return (mean + moved).to(self.mean.dtype)

    def plot(self) -> Any:
        """A matplotlib figure of means with 95 % intervals, and of correlations if there are few.

        It needs the extra `plots`. For a batch, choose one element: `y[0].plot()`.

        Example:
            cp.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 0.5]])).plot()
        """
        if self.batch_shape:
            raise ValueError(
                f"plot shows one Gaussian, and this is a batch {tuple(self.batch_shape)} of them; "
                "choose one, as in y[0].plot()"
            )
        low, high = (end.detach().reshape(-1).tolist() for end in self.interval())
        rho = self.correlation_matrix if len(low) <= MOST_CORRELATED else None
        return gaussian_figure(
            self.mean.detach().reshape(-1).tolist(), low, high,
            None if rho is None else rho.detach().tolist(),
        )  # fmt: skip


def checked_shape(sample_shape: int | Sequence[int]) -> torch.Size:
    """A number of draws, or the shape that they come in."""
    shape = (sample_shape,) if isinstance(sample_shape, int) else sample_shape
    if not isinstance(shape, Sequence) or not all(
        isinstance(size, int) and size >= 0 for size in shape
    ):
        raise TypeError(
            f"how many samples is a number or a shape, as in x.sample(10) or x.sample((10, 2)), "
            f"not {sample_shape!r}"
        )
    return torch.Size(shape)


def _fits(lead: torch.Size, x: Distribution) -> bool:
    """Whether leading dimensions broadcast with a batch."""
    pairs = zip(reversed(lead), reversed(x.batch_shape), strict=False)
    return all(1 in pair or pair[0] == pair[1] for pair in pairs)


def covariance_of(distribution: TorchDistribution) -> Covariance | Tensor:
    """The covariance of one of torch's normal distributions, in its structure."""
    if isinstance(distribution, LowRankMultivariateNormal):
        return LowRank(distribution.cov_factor, distribution.cov_diag)
    if isinstance(distribution, MultivariateNormal):
        return distribution.covariance_matrix
    if isinstance(distribution, Independent) and isinstance(distribution.base_dist, Normal):
        shape = (*distribution.batch_shape, distribution.event_shape.numel())
        return Diagonal(distribution.variance.reshape(shape))
    raise TypeError(
        f"{type(distribution).__name__} is not one of MultivariateNormal, "
        "LowRankMultivariateNormal and Independent(Normal(...), dims)"
    )
