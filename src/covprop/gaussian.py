"""The public value: a Gaussian, or a batch of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import Distribution

from covprop.arithmetic import Arithmetic, mapped_skewness, matrix_product
from covprop.covariance import Covariance, Dense, Diagonal, LinearMap, LowRank, Zero
from covprop.covariance.sharded import undistributed
from covprop.distribution import covariance_of
from covprop.error_estimate import Accuracy, Deferred, ErrorEstimate, SamplingError
from covprop.errors import positional_deprecated, warn_user
from covprop.gaussian_files import SLOTS, Stored
from covprop.validation import (
    check_batch_dims,
    check_batch_index,
    check_isotropic,
    check_low_rank,
    check_moments,
    check_shapes,
    check_skewness,
    check_tensors,
    check_values,
    checked_observation,
    checked_variances,
    given_variance,
    observation_noise,
)


class Gaussian(Arithmetic, Accuracy, Stored):
    """A Gaussian over tensors, or a batch of them.

    The mean has the shape `(*batch, *event)`, the covariance `(*batch, n, n)` with
    `n = prod(event)`. The leading dimensions of the covariance say which of the mean's are a batch.

    A matrix is replaced by its symmetric part, because rounding in products such as `A @ A.mT`
    differs between machines. Tensors are not copied, and a result may share those of its input:
    do not write into them.

    Args:
        mean: A tensor of float32 or float64.
        covariance: A tensor, a `DTensor` with sharded rows, or a structure of `cp.covariance`.
        validate_args: Whether to check that values are finite and the covariance is symmetric and
            positive semi-definite.
        method: The method that computed it, if one did.
        sampling: Standard errors, if it was sampled.
        mixture: The mixture with these moments, if there is one.
        skewness: Skewness of the elements, in the shape of the mean; zero where an element does not
            vary, None where it is not known.
        notes: Sentences on what the method did, and what it could not do.
        error: The estimated error, if there is one.

    Raises:
        InvalidGaussian: If shapes, dtypes or values do not describe a Gaussian.

    Example:
        cp.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 0.5]]))
    """

    __slots__ = SLOTS

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | Covariance,
        *,
        validate_args: bool = True,
        method: object = None,
        sampling: SamplingError | None = None,
        mixture: Any = None,
        skewness: Tensor | None = None,
        notes: Sequence[str] = (),
        error: ErrorEstimate | Deferred | None = None,
    ) -> None:
        """Check and keep."""
        given = isinstance(covariance, Tensor)
        covariance = undistributed(covariance)
        check_tensors(mean, covariance)
        structure = Dense(covariance) if isinstance(covariance, Tensor) else covariance
        check_shapes(mean, structure)
        if skewness is not None:
            check_skewness(mean, skewness, validate_args)
        if validate_args:
            check_values(mean, structure)
        if given or validate_args:  # else the library made it
            structure = structure.symmetrised()
        self._mean, self._covariance, self._method = mean, structure, method
        self._sampling, self._mixture = sampling, mixture
        self._skewness, self._notes, self._error = skewness, tuple(notes), error

    @classmethod
    def unchecked(
        cls, mean: Tensor, covariance: Covariance, *, method: object = None,
        sampling: SamplingError | None = None, mixture: Any = None, skewness: Tensor | None = None,
        notes: Sequence[str] = (), error: ErrorEstimate | Deferred | None = None,
    ) -> Self:  # fmt: skip
        """A Gaussian that the library has made, without the checks of the constructor."""
        result = object.__new__(cls)
        result._mean, result._covariance, result._method = mean, covariance, method
        result._sampling, result._mixture = sampling, mixture
        result._skewness, result._notes, result._error = skewness, tuple(notes), error
        return result

    @classmethod
    @positional_deprecated("stddev", "batch_dims")
    def isotropic(
        cls,
        mean: Tensor,
        *,
        stddev: float | Tensor | None = None,
        variance: float | Tensor | None = None,
        batch_dims: int = 0,
    ) -> "Gaussian":
        """Independent elements, all with one standard deviation.

        Args:
            mean: The mean.
            stddev: A number, or a tensor with one for each Gaussian of the batch.
            variance: The variance, in place of stddev.
            batch_dims: How many leading dimensions of the mean are a batch.

        Example:
            cp.Gaussian.isotropic(torch.zeros(5, 3), stddev=0.1, batch_dims=1)
        """
        check_tensors(mean, mean)
        check_batch_dims(mean, batch_dims)
        values = given_variance(mean, stddev, variance)
        check_isotropic(mean, values, batch_dims)
        values = values.reshape((*values.shape, *(1,) * (mean.dim() - values.dim())))
        return Gaussian.diagonal(mean, variance=values.expand(mean.shape), batch_dims=batch_dims)

    @classmethod
    @positional_deprecated("variance", "batch_dims")
    def diagonal(
        cls,
        mean: Tensor,
        *,
        stddev: Tensor | None = None,
        variance: Tensor | None = None,
        batch_dims: int = 0,
    ) -> "Gaussian":
        """Independent elements, each with a standard deviation of its own.

        Args:
            mean: The mean.
            stddev: Standard deviations, in the shape of the mean.
            variance: Variances, in place of stddev.
            batch_dims: How many leading dimensions of the mean are a batch.

        Example:
            cp.Gaussian.diagonal(torch.zeros(3), stddev=torch.tensor([0.1, 0.2, 0.3]))
        """
        check_tensors(mean, mean)
        check_batch_dims(mean, batch_dims)
        values = checked_variances(mean, stddev, variance)
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        return Gaussian(mean, Diagonal(values.reshape(*batch, size)))

    @classmethod
    @positional_deprecated("variance", "batch_dims")
    def low_rank(
        cls,
        mean: Tensor,
        factor: Tensor,
        *,
        stddev: Tensor | None = None,
        variance: Tensor | None = None,
        batch_dims: int = 0,
    ) -> "Gaussian":
        """Noise along a few directions, and optional independent noise.

        Args:
            mean: The mean.
            factor: k directions `(*batch, *event, k)`; the covariance is `factor @ factor.mT`.
            stddev: Standard deviations of the independent noise, in the shape of the mean.
            variance: Variances, in place of stddev.
            batch_dims: How many leading dimensions of the mean are a batch.

        Example:
            cp.Gaussian.low_rank(torch.zeros(3), torch.ones(3, 1), variance=torch.full((3,), 0.01))
        """
        check_low_rank(mean, factor, batch_dims)
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        noise = None
        if stddev is not None or variance is not None:
            noise = checked_variances(mean, stddev, variance).reshape(*batch, size)
        return Gaussian(mean, LowRank(factor.reshape(*batch, size, factor.shape[-1]), noise))

    @classmethod
    def constant(cls, value: Tensor, batch_dims: int = 0) -> "Gaussian":
        """A value without noise, for models whose weights are random.

        Args:
            value: The value.
            batch_dims: How many of its leading dimensions are a batch.
        """
        check_tensors(value, value)
        check_batch_dims(value, batch_dims)
        return Gaussian(value, Zero.like(value, batch_dims))

    @classmethod
    def from_torch(cls, distribution: Distribution) -> "Gaussian":
        """Convert a MultivariateNormal, LowRankMultivariateNormal or Independent(Normal)."""
        return Gaussian(distribution.mean, covariance_of(distribution), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The mean, `(*batch, *event)`."""
        return self._mean

    @property
    def covariance(self) -> Covariance:
        """The covariance in its structure."""
        return self._covariance

    @property
    def method(self) -> object:
        """The method that computed this Gaussian, or None."""
        return self._method

    @property
    def mixture(self) -> Any:
        """The `cp.Mixture` with these moments, if `cp.Split` computed them, else None."""
        return self._mixture

    @property
    def skewness(self) -> Tensor | None:
        """Skewness E[(y - E y)^3] / stddev^3 of the elements, in the shape of the mean, if known.

        `cdf`, `icdf` and `interval` use it.
        """
        return self._skewness

    def marginal(self, elements: Any) -> "Gaussian":
        """The Gaussian of some elements of the event.

        Args:
            elements: An index of the flattened event: a list, a slice or a mask.
        """
        index = self._elements(elements)
        shape = (*self.batch_shape, self.event_shape.numel())
        error = None if self._sampling is None else self._sampling.marginal(shape, index)
        return self._like(
            self._mean.reshape(shape)[..., index],
            self._covariance.take(index),
            None if self._skewness is None else self._skewness.reshape(shape)[..., index],
            error,
            self._mixture and self._mixture.marginal(elements),
            self._error and self._error.map(lambda tensor: tensor.reshape(shape)[..., index]),
        )

    def condition(
        self,
        elements: Any,
        value: Tensor,
        noise: float | Tensor | None = None,
        *,
        stddev: float | Tensor | None = None,
        variance: float | Tensor | None = None,
        covariance: Tensor | None = None,
    ) -> "Gaussian":
        """The Gaussian of the other elements, given an observation of these.

        The covariance of the observed elements may be singular. Mean and covariance are
        conditioned; a mixture and the skewness are dropped.

        Args:
            elements: An index of the flattened event, for m elements.
            value: The observed values, `(*batch, m)`.
            noise: Deprecated: variance or covariance, by its shape.
            stddev: Standard deviation of the observation's error: a number, or `(m,)`.
            variance: Its variance, in place of stddev.
            covariance: Its covariance `(m, m)`, in place of both.

        Raises:
            InvalidGaussian: If shapes or values do not fit.

        Example:
            x = cp.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 0.5]]))
            x.condition([1], torch.tensor([0.7]), stddev=0.1)
        """
        if noise is not None:
            if isinstance(noise, Tensor) and noise.dim() > 1:
                name, covariance = "covariance", noise
            else:
                name, variance = "variance", noise
            warn_user(f"condition takes noise by keyword: write {name}=...", DeprecationWarning)
        seen = self._elements(elements)
        size = self.event_shape.numel()
        rest = torch.ones(size, dtype=torch.bool, device=self.device)
        rest[seen] = False
        hidden = rest.nonzero()[:, 0]
        mean = self._mean.reshape(*self.batch_shape, size)
        observed = checked_observation(value, mean[..., seen])
        error = observation_noise(mean, len(seen), stddev, variance, covariance)
        gain, left = self._covariance.conditioned(seen, hidden, error)
        shift = gain @ (observed - mean[..., seen])[..., None]
        return Gaussian(
            mean[..., hidden] + shift[..., 0], left, validate_args=False,
            method=self._method, notes=self._notes,
        )  # fmt: skip

    def __matmul__(self, other: Tensor) -> "Gaussian":
        """`x @ A` for each event, as torch.matmul; see `A @ x`."""
        return self._mapped(matrix_product(other, self, left=False))

    def __rmatmul__(self, other: Tensor) -> "Gaussian":
        """`A @ x` for each event; the skewness is known where elements are independent."""
        return self._mapped(matrix_product(other, self, left=True))

    def _mapped(self, linear: LinearMap) -> "Gaussian":
        mean, skewness = linear.function(self._mean), None
        covariance = self._covariance.push(linear)
        if self._skewness is not None and self._covariance.independent:
            skewness = mapped_skewness(linear, self, covariance.diagonal()).reshape(mean.shape)
        return Gaussian(
            mean, covariance, validate_args=False, method=self._method, notes=self._notes,
            skewness=skewness,
        )  # fmt: skip

    def with_moments(
        self, mean: Tensor | None = None, covariance: Covariance | None = None,
        skewness: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """Replace mean, covariance or skewness, unchecked; errors and mixture are dropped."""
        result = self._like(
            self._mean if mean is None else mean,
            self._covariance if covariance is None else covariance,
            self._skewness if skewness is None else skewness,
        )
        check_moments(result._mean, result._covariance)
        return result

    def to(self, *args: Any, **kwargs: Any) -> "Gaussian":
        """Change dtype or device, as Tensor.to does."""
        mixture = self._mixture and self._mixture.to(*args, **kwargs)
        result = self._map(lambda tensor: tensor.to(*args, **kwargs), mixture)
        check_moments(result._mean, result._covariance)
        return result

    def reshape_batch(self, shape: Sequence[int]) -> "Gaussian":
        """The same Gaussians in a batch of another shape."""
        count = len(self.batch_shape)
        mixture = self._mixture and self._mixture.reshape_batch(shape)
        return self._map(lambda tensor: tensor.reshape(*shape, *tensor.shape[count:]), mixture)

    def detach(self) -> "Gaussian":
        """Detach all tensors from the autograd graph."""
        return self._map(torch.Tensor.detach, self._mixture and self._mixture.detach())

    def __getitem__(self, index: Any) -> "Gaussian":
        """Index the batch dimensions."""
        check_batch_index(index, self.batch_shape)
        return self._map(lambda tensor: tensor[index], self._mixture and self._mixture[index])

    def __iter__(self) -> Iterator["Gaussian"]:
        """Iterate over the first batch dimension."""
        return iter([self[i] for i in range(len(self))])

    def _map(self, function: Callable[[Tensor], Tensor], mixture: Any) -> "Gaussian":
        return self._like(
            function(self._mean),
            self._covariance.map(function),
            None if self._skewness is None else function(self._skewness),
            None if self._sampling is None else self._sampling.map(function),
            mixture,
            self._error and self._error.map(function),
        )

    def with_error(
        self, error: ErrorEstimate | Deferred | None, notes: Sequence[str] = ()
    ) -> "Gaussian":
        """Add an estimate of the error, and notes."""
        parts = self._mean, self._covariance, self._skewness, self._sampling, self._mixture
        result = self._like(*parts, error)
        result._notes = (*self._notes, *notes)
        return result

    def _like(
        self, mean: Tensor, covariance: Covariance, skewness: Tensor | None,
        sampling: SamplingError | None = None, mixture: Any = None, error: Any = None,
    ) -> Self:  # fmt: skip
        """Another one of the same type, by the same method, without checks."""
        return type(self).unchecked(
            mean, covariance, method=self._method, sampling=sampling, mixture=mixture,
            skewness=skewness, notes=self._notes, error=error,
        )  # fmt: skip
