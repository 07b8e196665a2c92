"""Discrete targets: yes or no, counts, classes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import Quadrature
from covprop.activations.smooth import sigmoid, softplus
from covprop.bayes.gaussian_likelihoods import LOG_2PI, exponential
from covprop.bayes.likelihoods import (
    TAIL,
    Cubature,
    Likelihood,
    Prediction,
    columns,
    flat_mean,
    log_integral,
)
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation

BLOCK = 2**22
"""Logits, of all points together, that are held at a time."""


def _binary_entropy(logit: Tensor) -> Tensor:
    """softplus(f) - f sigmoid(f), even in f, in nats."""
    size = logit.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


SIGMOID, SOFTPLUS, ENTROPY = sigmoid(), softplus(), Quadrature(_binary_entropy)


@final
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """P(t = 1 | f) = sigmoid(f), for each of k outputs on its own; targets are 0 and 1.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), stddev=0.1, batch_dims=1)
        bayes.Bernoulli().predict(output).mean
    """

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """t log sigmoid(f) + (1 - t) log sigmoid(-f), summed over targets."""
        return _log_bernoulli(values, columns(_check_binary(target), values)).sum(-1)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """t mu - E[softplus(f)], by quadrature in one dimension, summed over targets."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        t = columns(_check_binary(target), mean)
        softened = SOFTPLUS.mean(mean.double(), variance.double())
        return (t * mean - softened).sum(-1).to(output.dtype)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[sigmoid(+-f)], accurate relative to itself; a sum over targets, each on its own."""
        return _log_predictive(output, _check_binary(target), _log_bernoulli, _logit_bound)

    def predict(self, output: Gaussian) -> Prediction:
        """P = E[sigmoid(f)], variance E[sigmoid'(f)] + Var[sigmoid(f)], entropies."""
        mean, variance = flat_mean(output).double(), output.covariance.diagonal().double()
        p, epistemic, slope = SIGMOID.moments(mean, variance, 1)
        expected = ENTROPY.mean(mean, variance).sum(-1)
        prediction = Prediction(p, slope[0], epistemic, _entropy_of_binary(p), expected)
        return prediction.map(lambda part: part.to(output.dtype))

    def predict_draws(self, values: Tensor) -> Prediction:
        """Mean, variances and entropies from draws of the logits."""
        p = torch.sigmoid(values)
        expected = _binary_entropy(values).mean(0).sum(-1)
        return Prediction.of_draws(p, p * (1 - p), _entropy_of_binary(p.mean(0)), expected)


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts t of rate exp(f), for each of k outputs on its own.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), stddev=0.1, batch_dims=1)
        bayes.Poisson().log_predictive(output, torch.arange(5))
    """

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """t f - exp(f) - log t!, summed over targets."""
        return _log_poisson(values, columns(_check_counts(target), values)).sum(-1)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """t mu - exp(mu + S / 2) - log t!, summed; the exponential as in `exponential`."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        t = columns(_check_counts(target), mean)
        return (t * mean - exponential(mean + variance / 2) - torch.lgamma(t + 1)).sum(-1)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[p(t | f)] by quadrature in one dimension; a sum over targets, each on its own."""
        return _log_predictive(output, _check_counts(target), _log_poisson, _rate_bound)

    def predict(self, output: Gaussian) -> Prediction:
        """Mean r = exp(mu + S / 2); variance r, aleatoric, and r^2 (exp(S) - 1), epistemic."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        rate = torch.exp(mean + variance / 2)
        return Prediction(rate, rate, rate.square() * torch.expm1(variance))

    def predict_draws(self, values: Tensor) -> Prediction:
        """Average and variance of the rate."""
        rate = values.exp()
        return Prediction.of_draws(rate, rate)


@final
@dataclass(frozen=True)
class Delta:
    """The second-order Taylor expansion at the mean: cheap, and accurate for narrow logits.

    Example:
        bayes.Categorical(expectation=bayes.Delta())
    """


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """P(t = c | f) = softmax(f)_c for logits f, one for each class; targets are class numbers.

    Args:
        expectation: How to find E[log p]: `Cubature()` or `Delta()`.
        predictive: The points for E[p] and what is predicted from it.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 3), stddev=0.1, batch_dims=1)
        bayes.Categorical().predict(output).mutual_information
    """

    expectation: Cubature | Delta = field(default_factory=Cubature)
    predictive: Cubature = field(default_factory=lambda: Cubature(1024))

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """log softmax(f)_t."""
        return values.log_softmax(-1).gather(-1, _index(target, values))[..., 0]

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """mu_t - E[log sum_c exp(f_c)].

        Delta: E[...] ~ lse(mu) + tr(S H) / 2 with p = softmax(mu), H = diag(p) - p p^T.
        """
        mean, matrix = flat_mean(output), output.covariance_matrix
        chosen = mean.gather(-1, _index(target, mean))[..., 0]
        if isinstance(self.expectation, Delta):
            p = mean.softmax(-1)
            trace = (p * matrix.diagonal(dim1=-2, dim2=-1)).sum(-1)
            trace = trace - (p[..., None, :] @ matrix @ p[..., :, None])[..., 0, 0]
            return chosen - mean.logsumexp(-1) - trace / 2
        parts = [_log_sum(points) for _, points in _points(self.expectation, mean, matrix)]
        return chosen - _with_gradient(parts, mean, matrix)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[softmax(f)_t] by cubature, with positive weights: never the log of a negative."""
        mean, matrix = flat_mean(output), output.covariance_matrix
        index = _index(target, mean).reshape(-1, 1)
        parts = [
            _log_average(points, index[rows])
            for rows, points in _points(self.predictive, mean, matrix)
        ]
        return _with_gradient(parts, mean, matrix)

    @torch.no_grad()
    def predict(self, output: Gaussian) -> Prediction:
        """Probabilities E[p], variances E[p (1 - p)] and Var[p], entropies; without gradients."""
        mean, matrix = flat_mean(output), output.covariance_matrix
        points = _points(self.predictive, mean, matrix)
        parts = [self.predict_draws(values) for _, values in points]
        batch = mean.shape[:-1]
        return Prediction.cat(parts, 0).map(lambda t: t.reshape(*batch, *t.shape[1:]).to(mean))

    def predict_draws(self, values: Tensor) -> Prediction:
        """Probabilities, variances and entropies from draws of the logits."""
        p = values.softmax(-1)
        expected = torch.special.entr(p).sum(-1).mean(0)
        return Prediction.of_draws(p, p * (1 - p), torch.special.entr(p.mean(0)).sum(-1), expected)


def _entropy_of_binary(p: Tensor) -> Tensor:
    return (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1)


def _check_binary(target: Tensor) -> Tensor:
    # Other labels, as -1 and 1, would have a likelihood without a bound.
    if not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError("targets of Bernoulli are 0 and 1, or shares between; here are others")
    return target


def _check_counts(target: Tensor) -> Tensor:
    if not bool(((target >= 0) & (target == target.round())).all()):
        raise ValueError("targets of Poisson are whole numbers from 0, and here are others")
    return target


def _log_predictive(
    output: Gaussian, target: Tensor, log_density: Callable[[Tensor, Tensor], Tensor],
    bound: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """log of the integral of p(t | f) N(f; mu, S) over f, for log p concave in f."""
    mean, variance = flat_mean(output).double(), output.covariance.diagonal().double()
    t = columns(target, mean)
    deviation = standard_deviation(variance)

    def log_function(z: Tensor) -> Tensor:
        return log_density(mean + deviation * z, t) - (z.square() + LOG_2PI) / 2

    with torch.no_grad():
        reach = bound(mean, variance, t) + TAIL
    result = log_integral(log_function, reach, torch.zeros_like(reach))
    return result.sum(-1).to(output.dtype)


def _log_bernoulli(f: Tensor, t: Tensor) -> Tensor:
    return t * F.logsigmoid(f) + (1 - t) * F.logsigmoid(-f)


def _log_poisson(f: Tensor, t: Tensor) -> Tensor:
    return t * f - exponential(f) - torch.lgamma(t + 1)


def _logit_bound(mean: Tensor, variance: Tensor, t: Tensor) -> Tensor:
    """How far the mode is: z^2 / 2 costs no more than -log p at the mean, and |dz| <= sigma."""
    return torch.minimum((-2 * _log_bernoulli(mean, t)).sqrt(), standard_deviation(variance))


def _rate_bound(mean: Tensor, variance: Tensor, t: Tensor) -> Tensor:
    """How far the mode is: by the cost at the mean; and on the way to log t, or to exp(f) < 1."""
    best = torch.xlogy(t, t) - t
    cost = best - (t * mean - exponential(mean))
    way = (mean - t.clamp(min=1).log()).abs() * inverse_deviation(variance)
    way = torch.where(variance > 0, way + standard_deviation(variance), torch.inf)
    return torch.minimum((2 * cost.clamp(min=0)).sqrt(), way)


class _Average(NamedTuple):
    """An average over points, and its derivatives by mean and by half the covariance."""

    value: Tensor
    slope: Tensor
    curvature: Tensor


def _log_sum(values: Tensor) -> _Average:
    """lse(f): its gradient is p, its Hessian diag(p) - p p^T."""
    p = values.softmax(-1)
    slope = p.mean(0)
    curvature = torch.diag_embed(slope) - torch.einsum("s...i,s...j->...ij", p, p) / len(p)
    return _Average(values.logsumexp(-1).mean(0), slope, curvature)


def _log_average(values: Tensor, index: Tensor) -> _Average:
    """log of the average of p_t over points (count, rows, n), t given by index (rows, 1).

    p_t has the gradient p_t (e_t - p) and the Hessian
    p_t [(e_t - p)(e_t - p)^T - diag(p) + p p^T].
    """
    chosen = torch.zeros_like(values[0]).scatter(-1, index, 1.0)
    logs = (values.log_softmax(-1) * chosen).sum(-1)  # (count, rows)
    weight = logs.softmax(0)[..., None]
    p = values.softmax(-1)
    away = chosen - p
    curvature = torch.einsum("s...i,s...j->...ij", weight * away, away)
    curvature = curvature + torch.einsum("s...i,s...j->...ij", weight * p, p)
    curvature = curvature - torch.diag_embed((weight * p).sum(0))
    value = logs.logsumexp(0) - math.log(len(logs))
    return _Average(value, (weight * away).sum(0), curvature)


def _points(rule: Cubature, mean: Tensor, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the flattened batch, and the points (count, rows, n) of their logits.

    Softmax does not depend on the average of all logits: without it, points spread over less.
    """
    size = mean.shape[-1]
    centred = matrix.detach() - matrix.detach().mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    means, matrices = mean.detach().reshape(-1, size), centred.reshape(-1, size, size)
    step = max(1, BLOCK // (len(rule.nodes(size)) * size))
    for start in range(0, max(1, len(means)), step):
        rows = slice(start, start + step)
        yield rows, rule.around(means[rows], matrices[rows])


def _with_gradient(parts: list[_Average], mean: Tensor, matrix: Tensor) -> Tensor:
    """E[g(f)] (*batch,) with the gradient of the average, not of the points.

    dE/dmu = E[grad g] and dE/dS = E[hess g] / 2 (Price), which are right where S is singular too.
    """
    value, slope, curvature = (torch.cat(column) for column in zip(*parts, strict=True))
    first = (slope.reshape(mean.shape) * (mean - mean.detach())).sum(-1)
    second = (curvature.reshape(matrix.shape) * (matrix - matrix.detach())).sum((-2, -1))
    return value.reshape(mean.shape[:-1]).to(mean) + first.to(mean) + second.to(mean) / 2


def _index(target: Tensor, values: Tensor) -> Tensor:
    """Class numbers as an index (*batch, 1) of the last dimension."""
    batch = values.shape[:-1]
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"targets are class numbers (torch.long), not {target.dtype}")
    if target.dim() > len(batch) or target.shape != batch[len(batch) - target.dim() :]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} are not one class for each element of a batch "
            f"{tuple(batch)}"
        )
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < values.shape[-1]:
        raise ValueError(
            f"targets are class numbers from 0 to {values.shape[-1] - 1}, one for each logit, and "
            f"here are {int(target.min())} to {int(target.max())}"
        )
    return target.long().expand(batch)[..., None]
