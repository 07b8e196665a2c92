"""Yes or no, and counts: targets that one output each tells of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import Quadrature
from covprop.activations.smooth import sigmoid, softplus
from covprop.bayes.likelihoods.base import Likelihood, Prediction, columns, flat_mean
from covprop.bayes.likelihoods.gaussian import LOG_2PI, exponential
from covprop.bayes.likelihoods.marginal import TAIL, log_integral
from covprop.gaussian import Gaussian
from covprop.kernels.normal import inverse_deviation, standard_deviation


def _entropy(logit: Tensor) -> Tensor:
    """Of a yes or no with this logit: softplus(f) - f sigmoid(f), even in f, in nats."""
    size = logit.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


SIGMOID, SOFTPLUS, ENTROPY = sigmoid(), softplus(), Quadrature(_entropy)


@final
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """P(t = 1 | f) = sigmoid(f), for each of k outputs on its own; targets are 0 and 1."""

    def outputs(self, targets: int) -> int:
        """A logit for each."""
        return targets

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """T log sigmoid(f) + (1 - t) log sigmoid(-f), summed over targets."""
        t = columns(_answers(target), values.shape[:-1], values.shape[-1], values)
        return _log_bernoulli(values, t).sum(-1)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """T mu - E[softplus(f)], by quadrature in one dimension, summed over targets."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        t = columns(_answers(target), output.batch_shape, mean.shape[-1], mean)
        softened = SOFTPLUS.mean(mean.double(), variance.double())
        return (t * mean - softened).sum(-1).to(output.dtype)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[sigmoid(+-f)], accurate relative to itself; a sum over targets, each on its own."""
        return _log_predictive(output, _answers(target), _log_bernoulli, _logit_bound)

    def predict(self, output: Gaussian) -> Prediction:
        """P = E[sigmoid(f)], variance E[sigmoid'(f)] + Var[sigmoid(f)], entropies."""
        mean, variance = flat_mean(output).double(), output.covariance.diagonal().double()
        p, epistemic, slope = SIGMOID.moments(mean, variance, 1)
        total = (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1)
        expected = ENTROPY.mean(mean, variance).sum(-1)
        parts = (p, slope[0], epistemic, total, expected)
        return Prediction(*(part.to(output.dtype) for part in parts))

    def predict_draws(self, values: Tensor) -> Prediction:
        """The same from draws."""
        p = torch.sigmoid(values)
        mean = p.mean(0)
        return Prediction(
            mean,
            (p * (1 - p)).mean(0),
            p.var(0, correction=0),
            (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(-1),
            _entropy(values).mean(0).sum(-1),
        )


@final
@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts t of rate exp(f), for each of k outputs on its own."""

    def outputs(self, targets: int) -> int:
        """A log-rate for each."""
        return targets

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """T f - exp(f) - log t!, summed over targets."""
        t = columns(_counts(target), values.shape[:-1], values.shape[-1], values)
        return _log_poisson(values, t).sum(-1)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """T mu - exp(mu + S / 2) - log t!, summed; the exponential as in `exponential`."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        t = columns(_counts(target), output.batch_shape, mean.shape[-1], mean)
        return (t * mean - exponential(mean + variance / 2) - torch.lgamma(t + 1)).sum(-1)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[p(t | f)] by quadrature in one dimension; a sum over targets, each on its own."""
        return _log_predictive(output, _counts(target), _log_poisson, _rate_bound)

    def predict(self, output: Gaussian) -> Prediction:
        """Mean r = exp(mu + S / 2); variance r, aleatoric, and r^2 (exp(S) - 1), epistemic."""
        mean, variance = flat_mean(output), output.covariance.diagonal()
        rate = torch.exp(mean + variance / 2)
        return Prediction(rate, rate, rate.square() * torch.expm1(variance))

    def predict_draws(self, values: Tensor) -> Prediction:
        """Average and variance of the rate."""
        rate = values.exp()
        mean = rate.mean(0)
        return Prediction(mean, mean, rate.var(0, correction=0))


def _answers(target: Tensor) -> Tensor:
    """Labels that are something else, as -1 and 1, would have a likelihood without a bound."""
    if not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError("targets of Bernoulli are 0 and 1, or shares between; here are others")
    return target


def _counts(target: Tensor) -> Tensor:
    if not bool(((target >= 0) & (target == target.round())).all()):
        raise ValueError("targets of Poisson are whole numbers from 0, and here are others")
    return target


def _log_predictive(
    output: Gaussian,
    target: Tensor,
    log_density: Callable[[Tensor, Tensor], Tensor],
    bound: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """log of the integral of p(t | f) N(f; mu, S) over f, for log p concave in f."""
    mean, variance = flat_mean(output).double(), output.covariance.diagonal().double()
    t = columns(target, output.batch_shape, mean.shape[-1], mean)
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
