"""A mean and a covariance as a distribution, by the names of torch.distributions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution as TorchDistribution

from covprop.covariance import Covariance
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import correlation, inverse_deviation, known_deviation
from covprop.marginals import Marginals
from covprop.plots import MOST_CORRELATED, gaussian_figure


class Distribution(Marginals):
    """Moments, shapes, draws and densities."""

    __slots__ = ()

    @property
    @abstractmethod
    def covariance(self) -> Covariance:
        """The covariance in its structure."""

    @property
    def loc(self) -> Tensor:
        """The mean, by the name that torch.distributions has for it."""
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
        """Correlations (*batch, n, n): 1 on the diagonal, 0 with an element that does not vary."""
        inverse = inverse_deviation(self.covariance.diagonal())
        matrix = correlation(self.covariance_matrix, inverse[..., :, None], inverse[..., None, :])
        return torch.diagonal_scatter(matrix, torch.ones_like(inverse), dim1=-2, dim2=-1)

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch."""
        return self.covariance.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        """The shape of one draw."""
        return self.mean.shape[len(self.batch_shape) :]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Where mean and covariance are."""
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

        Gaussian ones, whatever skewness is known. A singular covariance is no obstacle.

        Args:
            sample_shape: How many, as a number or a shape; one draw by default.
            generator: Of the random numbers; torch's own by default.

        Example:
            x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
            x.sample((10,)).shape  # (10, 3)
        """
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    def rsample(
        self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the samples of `sample` as functions of mean and covariance, with gradients.

        Args:
            sample_shape: How many, as a number or a shape; one draw by default.
            generator: Of the random numbers; torch's own by default.

        Example:
            mean = torch.zeros(3, requires_grad=True)
            cp.Gaussian.isotropic(mean, stddev=0.1).rsample((10,)).sum().backward()
        """
        shape = checked_shape(sample_shape)
        noise = self.covariance.noise(shape.numel(), generator)
        return self.mean + noise.reshape(*shape, *self.mean.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The logarithm of the density at values, which is that of a normal distribution.

        Args:
            value: A tensor `(*sample_shape, *batch, *event)`, or one that broadcasts to it.

        Returns:
            A tensor `(*sample_shape, *batch)`.

        Raises:
            InvalidGaussian: Where the covariance is singular, or a shape is wrong.

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
            InvalidGaussian: Where the covariance is singular.

        Example:
            cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1).entropy()
        """
        return self.to_torch().entropy()

    def to_torch(self) -> TorchDistribution:
        """MultivariateNormal over the flattened event, or its low-rank or independent kind.

        Raises:
            InvalidGaussian: Where the covariance is singular, so that there is no density.
        """
        return self.covariance.to_torch(self.mean)

    def plot(self) -> Any:
        """A matplotlib figure of mean and 95 % intervals, and of the correlations if not too many.

        Needs the extra `plots`. Of a batch, choose one: `y[0].plot()`.

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
