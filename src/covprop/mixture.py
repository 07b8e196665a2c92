"""Several Gaussians with weights: what a Gaussian that was split came out as."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily

from covprop.covariance.base import symmetric
from covprop.gaussian import Gaussian
from covprop.sampling import SamplingError


@final
@dataclass(frozen=True)
class Mixture:
    """Weights (components,) and Gaussians, a batch (components, *batch)."""

    weights: Tensor
    components: Gaussian

    def moments(self, method: object = None) -> Gaussian:
        """The Gaussian with the mean and the covariance of the mixture, which it holds.

        m = sum_k w_k m_k,  S = sum_k w_k [S_k + (m_k - m)(m_k - m)^T]
        """
        parts, weights = self.components, self.weights
        flat = *parts.batch_shape, parts.event_shape.numel()
        means = parts.mean.reshape(flat)  # (components, *batch, n)
        mean = torch.einsum("k,k...->...", weights, means)
        apart = means - mean
        matrix = torch.einsum("k,k...->...", weights, parts.covariance_matrix)
        matrix = matrix + torch.einsum("k,k...i,k...j->...ij", weights, apart, apart)
        return Gaussian(
            mean.reshape(parts.mean.shape[1:]),
            symmetric(matrix),
            validate_args=False,
            method=method,
            sampling=self._sampling(apart),
            mixture=self,
        )

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw samples `(count, *batch, *event)`."""
        parts = self.components
        draws = parts.sample(count, generator)  # (count, components, *batch, *event)
        # torch.multinomial has no dtype or device of its own: those of the weights.
        batch = parts.batch_shape[1:]
        chosen = torch.multinomial(self.weights, count * batch.numel(), True, generator=generator)
        chosen = chosen.reshape(count, 1, *batch, *(1 for _ in parts.event_shape))
        return torch.take_along_dim(draws, chosen, dim=1)[:, 0]

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

    def _sampling(self, apart: Tensor) -> SamplingError | None:
        """Errors of the components, if they have any, which are independent."""
        parts = self.components
        if parts.mean_stderr is None or parts.covariance_stderr is None:
            return None
        assert parts.samples is not None
        squares = self.weights.square()
        of_means = parts.mean_stderr.reshape(apart.shape).square()
        of_mean = torch.einsum("k,k...->...", squares, of_means)
        matrix = torch.einsum("k,k...->...", squares, parts.covariance_stderr.square())
        # w_k (e_k a_k^T + a_k e_k^T) with a_k = m_k - m, to first order; errors e_k of means are
        # correlated as outputs are.
        lean = torch.einsum("k,k...i,k...j->...ij", squares, of_means, apart.square())
        ends = of_means.sqrt() * apart
        both = parts.correlation_matrix * ends[..., :, None] * ends[..., None, :]
        shared = 2 * torch.einsum("k,k...->...", squares, both)
        matrix = (matrix + lean + lean.mT + shared).clamp(min=0)
        return SamplingError(
            parts.samples * len(self.weights),
            of_mean.sqrt().reshape(parts.mean.shape[1:]),
            matrix.sqrt(),
        )
