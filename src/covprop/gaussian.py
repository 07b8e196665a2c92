"""The public value: a Gaussian, or a batch of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from covprop.covariance import Covariance, Dense, Diagonal, LowRank, Zero
from covprop.covariance.distributions import from_torch
from covprop.covariance.sharded import undistributed
from covprop.error_estimate import Accuracy, Deferred, ErrorEstimate, SamplingError
from covprop.errors import InvalidGaussian
from covprop.kernels.normal import correlation, inverse_deviation, known_deviation
from covprop.marginals import Marginals
from covprop.validation import (
    check_batch_dims,
    check_low_rank,
    check_shapes,
    check_skewness,
    check_stddev,
    check_tensors,
    check_values,
)

__all__ = ["Gaussian", "SamplingError"]


class Gaussian(Marginals, Accuracy):
    """A Gaussian over tensors, or a batch of them.

    The mean is `(*batch, *event)`, the covariance `(*batch, n, n)` with `n = prod(event)`.

    The covariance is a tensor, a `DTensor` whose rows are sharded (docs/scale.md) or a structure
    (`covprop.covariance`); its batch shape says which dimensions of the mean are the batch. A
    matrix that rounding left asymmetric is replaced by its symmetric part: what products such as
    `A @ A.mT` round differently above and below the diagonal differs between machines.
    Immutable: other tensors are not copied, and those of a result may be those of an input, so do
    not write into them.

    Args:
        mean: A tensor of float32 or float64.
        covariance: A matrix for each element of the batch, or a structure.
        validate_args: Whether to check that values are finite and the covariance is symmetric and
            positive semi-definite.
        method: What computed it, if anything did.
        sampling: Its standard errors, if it was sampled.
        mixture: The mixture that it has the moments of, if there is one.
        skewness: Normalised third central moments of the elements, in the shape of the mean, zero
            where an element does not vary; None where they are not known.
        notes: What the method did, and where it could not do what was asked, in sentences.
        error: How far it may be off, if that was estimated.

    Raises:
        InvalidGaussian: Where shapes, dtypes or values do not describe a Gaussian.

    Example:
        cp.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 0.5]]))
    """

    __slots__ = (
        "_covariance", "_error", "_mean", "_method", "_mixture", "_notes", "_sampling",
        "_skewness",
    )  # fmt: skip

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
        covariance = (
            covariance.values if isinstance(covariance, Dense) else undistributed(covariance)
        )
        check_tensors(mean, covariance)
        check_shapes(mean, covariance)
        if skewness is not None:
            check_skewness(mean, skewness, validate_args)
        structure = Dense(covariance) if isinstance(covariance, Tensor) else covariance
        if validate_args:
            check_values(mean, structure)
        if given or validate_args:  # else the library made it
            structure = structure.symmetrised()
        self._mean, self._covariance, self._method = mean, structure, method
        self._sampling, self._mixture = sampling, mixture
        self._skewness, self._notes, self._error = skewness, tuple(notes), error

    @classmethod
    def isotropic(cls, mean: Tensor, stddev: float | Tensor, batch_dims: int = 0) -> "Gaussian":
        """Independent elements, all with one standard deviation.

        batch_dims: how many leading dimensions of the mean are a batch; stddev may then be a tensor
        with one entry for each element of the batch.
        """
        check_tensors(mean, mean)
        width = torch.as_tensor(stddev, dtype=mean.dtype, device=mean.device)
        check_stddev(mean, width, batch_dims)
        while width.dim() < mean.dim():
            width = width[..., None]
        return Gaussian.diagonal(mean, width.square().expand(mean.shape), batch_dims)

    @classmethod
    def diagonal(cls, mean: Tensor, variance: Tensor, batch_dims: int = 0) -> "Gaussian":
        """Independent elements with variances of their own, in the shape of the mean.

        batch_dims: how many leading dimensions of the mean are a batch.
        """
        check_tensors(mean, variance)
        check_batch_dims(mean, batch_dims)
        if variance.shape != mean.shape:
            raise InvalidGaussian(
                f"variances have the shape of the mean {tuple(mean.shape)}, not "
                f"{tuple(variance.shape)}"
            )
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        return Gaussian(mean, Diagonal(variance.reshape(*batch, size)))

    @classmethod
    def low_rank(
        cls, mean: Tensor, factor: Tensor, variance: Tensor | None = None, batch_dims: int = 0
    ) -> "Gaussian":
        """Few directions of noise, factor (*batch, *event, k), and independent noise beside them.

        variance: of the independent noise, in the shape of the mean; batch_dims: how many leading
        dimensions of the mean are a batch.
        """
        check_low_rank(mean, factor, variance, batch_dims)
        batch, size = mean.shape[:batch_dims], mean.shape[batch_dims:].numel()
        values = None if variance is None else variance.reshape(*batch, size)
        return Gaussian(mean, LowRank(factor.reshape(*batch, size, factor.shape[-1]), values))

    @classmethod
    def constant(cls, value: Tensor, batch_dims: int = 0) -> "Gaussian":
        """A value that does not vary, and no matrix that says so: what varies is in the model.

        batch_dims: how many leading dimensions of the value are a batch.
        """
        check_tensors(value, value)
        check_batch_dims(value, batch_dims)
        return Gaussian(value, Zero.like(value, batch_dims))

    @classmethod
    def from_torch(cls, distribution: Distribution) -> "Gaussian":
        """From MultivariateNormal, LowRankMultivariateNormal, Independent(Normal)."""
        return Gaussian(distribution.mean, from_torch(distribution), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The mean, `(*batch, *event)`."""
        return self._mean

    @property
    def covariance(self) -> Covariance:
        """The covariance in its structure."""
        return self._covariance

    @property
    def covariance_matrix(self) -> Tensor:
        """The full covariance (*batch, n, n)."""
        return self._covariance.matrix()

    @property
    def variance(self) -> Tensor:
        """Variances, in the shape of the mean."""
        return self._covariance.diagonal().reshape(self._mean.shape)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations, in the shape of the mean; NaN where a variance is negative."""
        return known_deviation(self._covariance.diagonal()).reshape(self._mean.shape)

    @property
    def correlation_matrix(self) -> Tensor:
        """Correlations (*batch, n, n): 1 on the diagonal, 0 with an element that does not vary."""
        inverse = inverse_deviation(self._covariance.diagonal())
        matrix = correlation(self.covariance_matrix, inverse[..., :, None], inverse[..., None, :])
        return torch.diagonal_scatter(matrix, torch.ones_like(inverse), dim1=-2, dim2=-1)

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of the batch."""
        return self._covariance.batch_shape

    @property
    def event_shape(self) -> torch.Size:
        """The shape of one draw."""
        return self._mean.shape[len(self.batch_shape) :]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self._mean.dtype

    @property
    def device(self) -> torch.device:
        """Where mean and covariance are."""
        return self._mean.device

    @property
    def method(self) -> object:
        """The method that computed this Gaussian, or None."""
        return self._method

    @property
    def mixture(self) -> Any:
        """The `cp.Mixture` that this has the moments of, if `cp.Split` made it, else None.

        Marginals, elements of a batch and copies have theirs; what is conditioned has none.
        """
        return self._mixture

    @property
    def skewness(self) -> Tensor | None:
        """Normalised third central moments of the elements, in the shape of the mean, if known.

        E[(y - E y)^3] / stddev^3, which `cdf`, `icdf` and `interval` use.
        """
        return self._skewness

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Gaussian samples `(count, *batch, *event)`, whatever skewness is known.

        A singular covariance is no obstacle.
        """
        noise = self._covariance.noise(count, generator)
        return self._mean + noise.reshape(count, *self._mean.shape)

    def marginal(self, elements: Any) -> "Gaussian":
        """The Gaussian of some elements of the flattened event, given as an index of it."""
        index = self._elements(elements)
        shape = (*self.batch_shape, self.event_shape.numel())
        error = self._sampling
        if error is not None:
            rows = error.covariance[..., index[:, None], index]
            error = SamplingError(error.samples, error.mean.reshape(shape)[..., index], rows)
        return self._like(
            self._mean.reshape(shape)[..., index],
            self._covariance.take(index),
            None if self._skewness is None else self._skewness.reshape(shape)[..., index],
            error,
            self._mixture and self._mixture.marginal(elements),
            self.mapped(lambda tensor: tensor.reshape(shape)[..., index]),
        )

    def condition(
        self, elements: Any, value: Tensor, noise: float | Tensor | None = None
    ) -> "Gaussian":
        """The Gaussian of the other elements, given that these have (nearly) this value.

        elements: an index of the flattened event; value (*batch, m); noise: the covariance (m, m)
        of an error of the observation, variances (m,), or one variance for all of them. What is
        observed may be singular: directions in which it cannot vary tell nothing. The result has no
        mixture and no skewness: it is mean and covariance that are conditioned.
        """
        seen = self._elements(elements)
        size = self.event_shape.numel()
        rest = torch.ones(size, dtype=torch.bool, device=self.device)
        rest[seen] = False
        hidden = rest.nonzero()[:, 0]
        mean = self._mean.reshape(*self.batch_shape, size)
        error = None
        if noise is not None:
            error = torch.as_tensor(noise, dtype=self.dtype, device=self.device)
            if error.dim() <= 1:  # variances
                error = torch.diag_embed(error.expand(len(seen)))
            if bool((error.diagonal(dim1=-2, dim2=-1) < 0).any()):
                raise InvalidGaussian("the noise of an observation has a negative variance")
        gain, covariance = self._covariance.conditioned(seen, hidden, error)
        shift = gain @ (value - mean[..., seen])[..., None]
        return Gaussian(
            mean[..., hidden] + shift[..., 0], covariance, validate_args=False,
            method=self._method, notes=self._notes,
        )  # fmt: skip

    def with_moments(
        self, mean: Tensor | None = None, covariance: Covariance | None = None
    ) -> "Gaussian":
        """The same with another mean or covariance, unchecked; the skewness stays.

        Standard errors, the estimated error and the mixture are those of the old one, and dropped.
        """
        return self._like(
            self._mean if mean is None else mean,
            self._covariance if covariance is None else covariance,
            self._skewness,
        )

    def to_torch(self) -> Distribution:
        """MultivariateNormal over the flattened event, or its low-rank or independent kind."""
        return self._covariance.to_torch(self._mean)

    def to(self, *args: Any, **kwargs: Any) -> "Gaussian":
        """Change dtype or device, as Tensor.to does."""
        mixture = self._mixture and self._mixture.to(*args, **kwargs)
        return self._map(lambda tensor: tensor.to(*args, **kwargs), mixture)

    def reshape_batch(self, shape: Sequence[int]) -> "Gaussian":
        """The same Gaussians in a batch of another shape."""
        count = len(self.batch_shape)
        mixture = self._mixture and self._mixture.reshape_batch(shape)
        return self._map(lambda tensor: tensor.reshape(*shape, *tensor.shape[count:]), mixture)

    def detach(self) -> "Gaussian":
        """Leave the graph of autograd."""
        return self._map(torch.Tensor.detach, self._mixture and self._mixture.detach())

    def __getitem__(self, index: Any) -> "Gaussian":
        """Index the batch; the event is whole in every element of it."""
        used = index if isinstance(index, tuple) else (index,)
        if any(item is Ellipsis or item is None for item in used):
            raise IndexError("index the batch with integers, slices or tensors")
        count = sum(_indexed_dims(item) for item in used)
        if count > len(self.batch_shape):
            raise IndexError(
                f"{count} indices for a batch of shape {tuple(self.batch_shape)}; the event is "
                "not indexed: select its elements with cp.propagate(lambda x: x[...], gaussian)"
            )
        return self._map(lambda tensor: tensor[index], self._mixture and self._mixture[index])

    def __iter__(self) -> Iterator["Gaussian"]:
        """Along the first batch dimension."""
        return iter([self[i] for i in range(len(self))])

    def __len__(self) -> int:
        """The size of the first batch dimension."""
        if not self.batch_shape:
            raise TypeError("a single Gaussian has no length; only a batch does")
        return self.batch_shape[0]

    def __repr__(self) -> str:
        """Shapes and types, no numbers."""
        structure = type(self._covariance).__name__
        return (
            f"{type(self).__name__}(batch_shape={tuple(self.batch_shape)}, event_shape="
            f"{tuple(self.event_shape)}, covariance={structure}, dtype={self.dtype})"
        )

    def __getstate__(self) -> Any:
        """All but an estimate of the error that nobody has asked for: it needs the model."""
        state = {name: getattr(self, name) for name in Gaussian.__slots__}
        if isinstance(error := state["_error"], Deferred):
            state["_error"] = error.value if error.known else None
        return None, state

    def _elements(self, elements: Any) -> Tensor:
        numbers = torch.arange(self.event_shape.numel(), device=self.device)
        index: Tensor = numbers[elements].reshape(-1)
        if len(index.unique()) < len(index):
            raise IndexError("an element of the event is named twice")
        return index

    def _map(self, function: Callable[[Tensor], Tensor], mixture: Any) -> "Gaussian":
        return self._like(
            function(self._mean),
            self._covariance.map(function),
            None if self._skewness is None else function(self._skewness),
            None if self._sampling is None else self._sampling.map(function),
            mixture,
            self.mapped(function),
        )

    def with_error(
        self, error: ErrorEstimate | Deferred | None, notes: Sequence[str] = ()
    ) -> "Gaussian":
        """The same with an estimate of its error, and further notes."""
        result = object.__new__(type(self))
        for name in Gaussian.__slots__:
            setattr(result, name, getattr(self, name))
        result._error, result._notes = error, (*self._notes, *notes)
        return result

    def _like(
        self, mean: Tensor, covariance: Covariance, skewness: Tensor | None,
        sampling: SamplingError | None = None, mixture: Any = None,
        error: ErrorEstimate | Deferred | None = None,
    ) -> "Gaussian":  # fmt: skip
        """Another one of the same type, by the same method, without checks."""
        result = object.__new__(type(self))
        Gaussian.__init__(
            result, mean, covariance, validate_args=False, method=self._method, sampling=sampling,
            mixture=mixture, skewness=skewness, notes=self._notes, error=error,
        )  # fmt: skip
        return result


def _indexed_dims(item: Any) -> int:
    """How many dimensions one index takes up."""
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
