"""Several Gaussians with weights: what a Gaussian that was split came out as."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily

from covprop.covariance.base import symmetric
from covprop.distribution import checked_shape
from covprop.error_estimate import SamplingError
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation


@final
@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians, as from `cp.Split`.

    Args:
        weights: The weights of the components, (components,), which sum to 1.
        components: The Gaussians, a batch (components, *batch).
        offsets: The means of the components minus that of the mixture, (components, *batch, n), if
            they are known more accurately than the difference of the rounded means.

    Example:
        parts = cp.Gaussian.isotropic(torch.tensor([[-1.0], [1.0]]), stddev=0.5, batch_dims=1)
        cp.Mixture(torch.tensor([0.5, 0.5]), parts).moments().variance  # 0.25 + 1
    """

    weights: Tensor
    components: Gaussian
    offsets: Tensor | None = None

    def moments(self, method: object = None) -> Gaussian:
        """The Gaussian with the mean and the covariance of the mixture, which it holds.

        m = sum_k w_k m_k,  S = sum_k w_k [S_k + (m_k - m)(m_k - m)^T], sums in float64. It has a
        skewness where the components have one.
        """
        parts, weights = self.components, self.weights.double()
        flat = *parts.batch_shape, parts.event_shape.numel()
        means = parts.mean.reshape(flat).double()  # (components, *batch, n)
        mean = torch.einsum("k,k...->...", weights, means)
        deviations = means - mean if self.offsets is None else self.offsets.double()
        matrix = torch.einsum("k,k...->...", self.weights, parts.covariance_matrix).double()
        matrix = matrix + torch.einsum("k,k...i,k...j->...ij", weights, deviations, deviations)
        return Gaussian(
            mean.reshape(parts.mean.shape[1:]).to(parts.dtype),
            symmetric(matrix).to(parts.dtype),
            validate_args=False,
            method=method,
            sampling=self._sampling(deviations.to(parts.dtype)),
            mixture=self,
            skewness=self._skewness(deviations, matrix.diagonal(dim1=-2, dim2=-1)),
            notes=parts.notes,
        )

    def marginal(self, elements: Any) -> "Mixture":
        """The mixture of some elements of the flattened event."""
        places = torch.arange(self.components.event_shape.numel(), device=self.weights.device)
        index = places[elements].reshape(-1)
        return Mixture(
            self.weights, self.components.marginal(elements), self._offsets(lambda t: t[..., index])
        )

    def to(self, *args: Any, **kwargs: Any) -> "Mixture":
        """Change dtype or device, as Tensor.to does."""
        return Mixture(
            self.weights.to(*args, **kwargs),
            self.components.to(*args, **kwargs),
            self._offsets(lambda t: t.to(*args, **kwargs)),
        )

    def detach(self) -> "Mixture":
        """Detach all tensors from the autograd graph."""
        offsets = self._offsets(Tensor.detach)
        return Mixture(self.weights.detach(), self.components.detach(), offsets)

    def reshape_batch(self, shape: Sequence[int]) -> "Mixture":
        """The same mixtures in a batch of another shape."""
        shape = len(self.weights), *shape
        return Mixture(
            self.weights,
            self.components.reshape_batch(shape),
            self._offsets(lambda t: t.reshape(*shape, t.shape[-1])),
        )

    def __getitem__(self, index: Any) -> "Mixture":
        """Index the batch; the components stay."""

        def each(tensor: Tensor) -> Tensor:  # torch puts what is indexed first, or not
            return torch.stack([part[index] for part in tensor])

        parts, error = self.components, self.components.sampling_error
        components = Gaussian(
            each(parts.mean),
            parts.covariance.map(each),
            validate_args=False,
            method=parts.method,
            sampling=None if error is None else error.map(each),
            skewness=None if parts.skewness is None else each(parts.skewness),
            notes=parts.notes,
        )
        return Mixture(self.weights, components, self._offsets(each))

    @torch.no_grad()
    def sample(
        self, sample_shape: int | Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw samples `(*sample_shape, *batch, *event)`."""
        parts, shape = self.components, checked_shape(sample_shape)
        count, batch = shape.numel(), parts.batch_shape[1:]
        draws = parts.sample(count, generator)  # (count, components, *batch, *event)
        # torch.multinomial has no dtype or device of its own: those of the weights.
        chosen = torch.multinomial(self.weights, count * batch.numel(), True, generator=generator)
        chosen = chosen.reshape(count, 1, *batch, *(1 for _ in parts.event_shape))
        drawn = torch.take_along_dim(draws, chosen, dim=1)[:, 0]
        return drawn.reshape(*shape, *drawn.shape[1:])

    def to_torch(self) -> MixtureSameFamily:
        """A torch.distributions object, over the flattened event unless components are diagonal."""
        batch = self.components.batch_shape
        last = Gaussian(
            self.components.mean.movedim(0, len(batch) - 1),
            self.components.covariance.map(lambda tensor: tensor.movedim(0, len(batch) - 1)),
            validate_args=False,
        )
        weights = self.weights.expand(*batch[1:], batch[0])
        return MixtureSameFamily(Categorical(probs=weights), last.to_torch())

    def _offsets(self, function: Callable[[Tensor], Tensor]) -> Tensor | None:
        """A function of the offsets, if there are any."""
        return None if self.offsets is None else function(self.offsets)

    def _skewness(self, deviations: Tensor, variance: Tensor) -> Tensor | None:
        """sum_k w_k [m3_k + 3 d_k s_k^2 + d_k^3] / s^3 with d_k = m_k - m, if m3_k are known."""
        parts = self.components
        if parts.skewness is None:
            return None
        own, variances = (
            t.double().reshape(deviations.shape) for t in (parts.skewness, parts.variance)
        )
        third = own * standard_deviation(variances) ** 3 + deviations * (
            3 * variances + deviations.square()
        )
        total = torch.einsum("k,k...->...", self.weights.double(), third)
        skewness = total * inverse_deviation(variance) ** 3
        return skewness.reshape(parts.mean.shape[1:]).to(parts.dtype)

    def _sampling(self, deviations: Tensor) -> SamplingError | None:
        """Errors of the components, if they have any, which are independent."""
        parts = self.components
        if parts.mean_stderr is None or parts.covariance_stderr is None:
            return None
        assert parts.samples is not None
        squares = self.weights.square()
        of_means = parts.mean_stderr.reshape(deviations.shape).square()
        of_mean = torch.einsum("k,k...->...", squares, of_means)
        matrix = torch.einsum("k,k...->...", squares, parts.covariance_stderr.square())
        # w_k (e_k a_k^T + a_k e_k^T) with a_k = m_k - m, to first order; errors e_k of means are
        # correlated as outputs are.
        lean = torch.einsum("k,k...i,k...j->...ij", squares, of_means, deviations.square())
        ends = of_means.sqrt() * deviations
        both = parts.correlation_matrix * ends[..., :, None] * ends[..., None, :]
        shared = 2 * torch.einsum("k,k...->...", squares, both)
        matrix = (matrix + lean + lean.mT + shared).clamp(min=0)
        return SamplingError(
            parts.samples * len(self.weights),
            of_mean.sqrt().reshape(parts.mean.shape[1:]),
            matrix.sqrt(),
        )
