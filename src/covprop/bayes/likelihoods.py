"""Likelihoods: what one is, and averages over Gaussian outputs by quadrature and cubature."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from covprop.gaussian import Gaussian
from covprop.kernels.normal import standard_deviation
from covprop.methods.montecarlo import HALF_CELL

GRID = 33
"""Points of the search."""
ROUNDS = 8
"""Each narrows the interval to what matters of it, sixteenfold at most."""
DEPTH = 45.0
"""Below exp(-45) of its largest value a function adds nothing in float64."""
PEAK = 1.0
"""How far, in its logarithm, the function is below its maximum where its peak ends."""
NODES = 257
"""Of the trapezoidal rule, which is spectrally accurate for what vanishes at both ends."""
TAIL = 10.0
"""Standard deviations, from the centre of a Gaussian factor, that hold all of its mass."""
SEED = 0
"""Of the scrambling of Sobol's points; any other does as well."""
SPARE = 4
"""Points for each dimension, at least, so that their covariance can be made the identity."""


@final
@dataclass(frozen=True)
class Prediction:
    """Moments of the target, its variance split by the law of total variance.

    Var[t] = E[Var[t | f]] + Var[E[t | f]], all of shape (*batch, k). For classes, the mean holds
    the probabilities, and the variances are those of an indicator (0 or 1) for each class.

    Attributes:
        mean: E[t], or the probabilities of the classes.
        aleatoric: E[Var[t | f]]: noise that would remain if the outputs f were known.
        epistemic: Var[E[t | f]]: the part that comes from uncertain outputs f.
        entropy: For classes only, (*batch,): the entropy of the predicted class, in nats.
        expected_entropy: For classes only, (*batch,): the expected entropy if the outputs were
            known.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), stddev=0.1, batch_dims=1)
        bayes.Poisson().predict(output).stddev
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None

    @classmethod
    def of_draws(cls, mean: Tensor, variance: Tensor, *entropies: Tensor) -> "Prediction":
        """Average moments given f, (samples, *batch, k), by the law of total variance."""
        return cls(mean.mean(0), variance.mean(0), mean.var(0, correction=0), *entropies)

    @classmethod
    def cat(cls, parts: Sequence["Prediction"], dim: int) -> "Prediction":
        """Concatenate predictions along a dimension of the batch."""
        columns = ([getattr(part, one.name) for part in parts] for one in fields(cls))
        joined: list[Any] = [None if one[0] is None else torch.cat(one, dim) for one in columns]
        return cls(*joined)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Prediction":
        """Apply a function to every tensor."""
        values = (getattr(self, one.name) for one in fields(self))
        mapped: list[Any] = [None if value is None else function(value) for value in values]
        return Prediction(*mapped)

    @property
    def variance(self) -> Tensor:
        """The sum of both parts."""
        return self.aleatoric + self.epistemic

    @property
    def stddev(self) -> Tensor:
        """The root of the variance."""
        return self.variance.sqrt()

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of class and outputs f, (*batch,): entropy that comes from f."""
        if self.entropy is None or self.expected_entropy is None:
            raise ValueError("mutual information needs classes; use .epistemic for numbers")
        # Jensen's inequality makes it non-negative; rounding alone would not.
        return (self.entropy - self.expected_entropy).clamp(min=0)


class Likelihood(ABC):
    """The distribution p(t | f) of a target given outputs f, and its averages over Gaussian f.

    Outputs have the shape (*batch, n), targets (*batch, k) or, for one target, (*batch,). Leading
    dimensions that a target lacks (draws, members of an ensemble) are shared by it.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), stddev=0.1, batch_dims=1)
        bayes.Bernoulli().expected_log_prob(output, torch.ones(5))
    """

    def outputs(self, targets: int) -> int:
        """Count the outputs that a network needs for so many targets, or classes: one for each."""
        return targets

    @abstractmethod
    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """log p(t | f) for known outputs f, (*batch,)."""

    @abstractmethod
    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """E[log p(t | f)], (*batch,): the first term of the ELBO."""

    @abstractmethod
    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[p(t | f)], (*batch,): the predicted density of the target."""

    @abstractmethod
    def predict(self, output: Gaussian) -> Prediction:
        """Mean and variance of the target for Gaussian outputs."""

    @abstractmethod
    def predict_draws(self, values: Tensor) -> Prediction:
        """Mean and variance of the target from draws of the outputs (samples, *batch, n)."""

    def log_predictive_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """log of the average of p(t | f) over draws (samples, *batch, n)."""
        return self.log_prob(values, target).logsumexp(0) - math.log(len(values))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the learned parameters: none, unless the likelihood is a module."""
        return iter(())


def flat_mean(output: Gaussian) -> Tensor:
    """The mean as (*batch, n), whatever the shape of the event."""
    return output.mean.reshape(*output.batch_shape, output.event_shape.numel())


def columns(target: Tensor, like: Tensor) -> Tensor:
    """Shape a target as (*batch', k), batch' the end of the batch of outputs (*batch, k).

    Of one target, the last dimension may be missing.
    """
    batch, count = like.shape[:-1], like.shape[-1]
    missing = count == 1 and target.shape == batch[len(batch) - target.dim() :]
    shaped = target[..., None] if missing and target.dim() <= len(batch) else target
    lead = shaped.shape[:-1]
    if shaped.dim() == 0 or shaped.shape[-1] != count or lead != batch[len(batch) - len(lead) :]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} do not go with {count} for each element of a "
            f"batch {tuple(batch)}; give them the shape {(*batch, count)}"
        )
    return shaped.to(like)


def log_integral(log_function: Callable[[Tensor], Tensor], reach: Tensor, centre: Tensor) -> Tensor:
    """log of the integral of exp(h(z)) over z in [-reach, reach], element by element.

    h takes points (nodes, *shape) and is unimodal, or has modes that a grid of 33 points sees;
    centre is a point where it is known not to be too small. Nodes are dense at the peak,
    z = p + w sinh(u), as it may be far narrower than what else matters. The search for both has
    no gradient: the integral does not depend on it.
    """
    with torch.no_grad():
        half = reach + centre.abs()
        low, high, best = _narrowed(log_function, centre - half, centre + half, centre, DEPTH)
        left, right, peak = _narrowed(log_function, low, high, best, PEAK)
        scale = (right - left) / 2
        first, last = torch.asinh((low - peak) / scale), torch.asinh((high - peak) / scale)
        u = first + (last - first) * _unit(NODES, reach)
        nodes = peak + scale * torch.sinh(u)
        log_weight = (scale * torch.cosh(u) * (last - first) / (NODES - 1)).log()
    return (log_function(nodes) + log_weight).logsumexp(0)


def _narrowed(
    log_function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, best: Tensor, depth: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of an interval where h is not further than depth below its maximum, and where.

    best: a point in it. A grid may miss a narrow peak that an earlier one saw, which is why the
    best point of all is kept.
    """
    grid, most = _unit(GRID, low), log_function(best[None])[0]
    for _ in range(ROUNDS):
        step = (high - low) / (GRID - 1)
        points = low + (high - low) * grid
        values = log_function(points)
        value, place = values.max(0)
        best = torch.where(value > most, points.gather(0, place[None])[0], best)
        most = torch.maximum(value, most)
        relevant = torch.where(values >= most - depth, points, best)
        # A cell more on either side: the edge is in it.
        low = torch.maximum(low, relevant.amin(0) - step)
        high = torch.minimum(high, relevant.amax(0) + step)
    return low, high, best


def _unit(count: int, like: Tensor) -> Tensor:
    """Even points of [0, 1], in front of the shape of a tensor."""
    points = torch.linspace(0, 1, count, dtype=like.dtype, device=like.device)
    return points.reshape(-1, *[1] * like.dim())


@final
@dataclass(frozen=True)
class Cubature:
    """Points with equal weights for the standard normal density: Sobol's, and their negatives.

    A linear map gives them the identity as covariance, so polynomials of degree 3 are averaged
    exactly. For narrow Gaussians they are at least as good as the second-order delta method. For
    wide ones they stay reliable, where rules of higher degree do not. Errors are in
    `docs/bayes-reference.md`.

    Args:
        points: The number of points, an even number; 4 for each dimension if that is more.

    Example:
        bayes.Categorical(expectation=bayes.Cubature(points=256))
    """

    points: int = 128

    def __post_init__(self) -> None:
        if self.points < SPARE or self.points % 2:
            raise ValueError(f"points come in pairs, and from {SPARE}; not {self.points}")

    def nodes(self, size: int) -> Tensor:
        """Return the points (count, size) of so many dimensions, in float64."""
        return _nodes(size, max(self.points, SPARE * size))

    def around(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return points (count, *batch, n) of the Gaussian with these moments, without gradient.

        It uses the symmetric root of the covariance, which is unique and continuous.
        """
        with torch.no_grad():
            eigenvalues, vectors = torch.linalg.eigh(covariance.double())
            root = (vectors * standard_deviation(eigenvalues)[..., None, :]) @ vectors.mT
            nodes = self.nodes(mean.shape[-1]).to(mean.device)
            return mean.double() + (nodes @ root).movedim(-2, 0)


@lru_cache
def _nodes(size: int, count: int) -> Tensor:
    uniform = SobolEngine(size, scramble=True, seed=SEED).draw(count // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform + HALF_CELL)
    points = torch.cat([half, -half])
    factor = torch.linalg.cholesky(points.mT @ points / len(points))
    return torch.linalg.solve_triangular(factor, points.mT, upper=False).mT.contiguous()
