"""Distribution functions of the elements of a Gaussian, each by itself."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from covprop.kernels import normal, pearson


class Marginals(ABC):
    """Elements of which a mean, a standard deviation and perhaps a skewness are known."""

    __slots__ = ()

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The mean."""

    @property
    @abstractmethod
    def stddev(self) -> Tensor:
        """Standard deviations, in the shape of the mean."""

    @property
    @abstractmethod
    def skewness(self) -> Tensor | None:
        """Normalised third central moments, in the shape of the mean, if they are known."""

    def cdf(self, value: float | Tensor) -> Tensor:
        """P(element <= value) of each element by itself, computed in float64.

        Of a normal distribution, or where the skewness is known of Pearson's type III, a shifted
        gamma distribution with the same three moments, which is monotone for every skewness. An
        element that does not vary jumps from 0 to 1. Differentiable, with a skewness once (by it,
        by differences of fourth order).

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
        """The number that each element is below with a given probability: the inverse of `cdf`.

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
        """The ends of the central interval of each element, with half of the rest on either side.

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
