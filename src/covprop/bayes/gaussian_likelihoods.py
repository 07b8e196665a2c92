"""Gaussian targets: noise that the network predicts, and noise of one size."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from covprop.bayes.likelihoods import (
    TAIL,
    Likelihood,
    Prediction,
    columns,
    flat_mean,
    log_integral,
)
from covprop.gaussian import Gaussian
from covprop.kernels.normal import cumulative, density, inverse_deviation, standard_deviation

LOG_2PI = math.log(2 * math.pi)
LARGEST = 700.0
"""The largest size of a log-variance whose exponential float64 holds."""
NODES, REACH = 257, 9.0
"""Of the trapezoidal rule for a cumulative probability, and how many deviations of l it spans."""
STEPS = 8
"""Of a fixed-point iteration for the place of a peak."""


class GaussianNoise(Likelihood, ABC):
    """A likelihood whose targets are Gaussian given the outputs."""

    @abstractmethod
    def target(self, output: Gaussian) -> Gaussian:
        """The Gaussian of the noiseless targets."""

    @abstractmethod
    def noise_variance(self, output: Gaussian) -> Tensor:
        """The expected variance of the noise, (*batch, k)."""

    @abstractmethod
    def cumulative(self, output: Gaussian, target: Tensor) -> Tensor:
        """P(T <= t) of each target on its own, (*batch, k)."""

    @abstractmethod
    def cumulative_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """The average of P(T <= t | f) over draws (samples, *batch, n)."""

    def predict(self, output: Gaussian) -> Prediction:
        """Mean of noiseless targets; variance of the noise, aleatoric, and theirs, epistemic."""
        noiseless = self.target(output)
        return Prediction(noiseless.mean, self.noise_variance(output), noiseless.variance)


@final
@dataclass(frozen=True)
class HeteroskedasticGaussian(GaussianNoise):
    """t ~ N(m, exp(l)): the network predicts the mean and the logarithm of the variance.

    Outputs (m_1 ... m_k, l_1 ... l_k) for k targets, which are independent given the outputs.

    Example:
        elbo = bayes.ELBO(bayes.HeteroskedasticGaussian(), data_size=100)
        elbo(bayes.BayesLinear(3, 2), torch.ones(10, 3), torch.ones(10)).elbo
    """

    def outputs(self, targets: int) -> int:
        """A mean and a log-variance for each."""
        return 2 * targets

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """-1/2 [log 2pi + l + exp(-l) (m - t)^2], summed over targets."""
        mean, log_variance = _halves(values)
        squares = (mean - columns(target, mean)).square()
        return _log_normal(log_variance, squares * exponential(-log_variance)).sum(-1)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """-1/2 [log 2pi + mu_l + exp(-mu_l + S_ll / 2) (S_mm + (mu_m - S_ml - t)^2)], summed.

        exp(-l) tilts the Gaussian of (m, l) by (-S_ml, -S_ll). Beyond `exponential`'s bound the
        exponential goes on as its tangent, so that value and gradient are finite.
        """
        mean, log_variance, of_mean, cross, of_log = _moments(output)
        precision = exponential(of_log / 2 - log_variance)
        squares = of_mean + (mean - cross - columns(target, mean)).square()
        return _log_normal(log_variance, precision * squares).sum(-1)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log of the integral of N(t; E[m | l], Var[m | l] + exp(l)) N(l; mu_l, S_ll) over l."""
        mean, log_variance, of_mean, cross, of_log = (part.double() for part in _moments(output))
        t = columns(target, mean)
        deviation = standard_deviation(of_log)
        slope = cross * inverse_deviation(of_log)  # of E[m | l] in standard deviations of l
        left = (of_mean - slope.square()).clamp(min=0)

        def log_function(z: Tensor) -> Tensor:
            total = _log_sum(left, log_variance + deviation * z)
            residual = (t - mean - slope * z).square() * torch.exp(-total)
            return _log_normal(total, residual) - (z.square() + LOG_2PI) / 2

        with torch.no_grad():
            # Where m follows l, there is a narrow peak at the l that explains t; else 0 is as good.
            centre = torch.zeros_like(t - mean)
            start = log_function(centre)
            for _ in range(STEPS):
                noise = _log_sum(left, log_variance + deviation * centre).exp()
                centre = slope * (t - mean) / (slope.square() + noise)
            there = log_function(centre)
            centre = torch.where(there > start, centre, 0)
            total = _log_sum(left, log_variance)
            # z^2 / 2 costs no more than the likelihood gains on the way to the mode.
            gain = -total / 2 - LOG_2PI - torch.maximum(start, there)
            reach = (2 * gain.clamp(min=0)).sqrt() + deviation + TAIL
        return log_integral(log_function, reach, centre).sum(-1).to(output.dtype)

    def cumulative(self, output: Gaussian, target: Tensor) -> Tensor:
        """P(T <= t) of each target, (*batch, k): an average of Phi over l, by the trapezoidal rule.

        Within 1e-8 up to S_ll = 100 and 1e-3 up to 2500; 1e-5 where m and l are correlated by 0.999
        and noise is small.
        """
        mean, log_variance, of_mean, cross, of_log = (part.double() for part in _moments(output))
        nodes = torch.linspace(-REACH, REACH, NODES, dtype=mean.dtype, device=mean.device)
        weights = density(nodes) * (2 * REACH / (NODES - 1))
        z = nodes.reshape(-1, *[1] * mean.dim())
        slope = cross * inverse_deviation(of_log)
        left = (of_mean - slope.square()).clamp(min=0)
        total = _log_sum(left, log_variance + standard_deviation(of_log) * z)
        below = cumulative((columns(target, mean) - mean - slope * z) * torch.exp(-total / 2))
        return torch.tensordot(weights, below, 1).to(output.dtype)

    def cumulative_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """The average of P(T <= t | m, l) over draws (samples, *batch, 2k)."""
        mean, log_variance = _halves(values)
        distance = columns(target, mean) - mean
        return cumulative(distance * exponential(-log_variance / 2)).mean(0)

    def target(self, output: Gaussian) -> Gaussian:
        """The Gaussian of the means m, without the log-variances."""
        return output.marginal(slice(output.event_shape.numel() // 2))

    def noise_variance(self, output: Gaussian) -> Tensor:
        """E[exp(l)] = exp(mu_l + S_ll / 2), (*batch, k)."""
        _, log_variance, _, _, of_log = _moments(output)
        return torch.exp(log_variance + of_log / 2)

    def predict_draws(self, values: Tensor) -> Prediction:
        """Averages of m and of exp(l), variance of m."""
        mean, log_variance = _halves(values)
        return Prediction.of_draws(mean, log_variance.exp())


@final
class HomoskedasticGaussian(nn.Module, GaussianNoise):
    """t ~ N(f, s^2) with constant noise s, learned or fixed.

    Args:
        stddev: The initial noise: a number, one for each target (k,), or for each member of
            an ensemble too (members, 1, k).
        learned: Whether its logarithm is a parameter.

    Example:
        bayes.ELBO(bayes.HomoskedasticGaussian(0.1, learned=False), data_size=100)
    """

    log_variance: Tensor

    def __init__(self, stddev: float | Tensor = 1.0, *, learned: bool = True) -> None:
        super().__init__()
        width = torch.as_tensor(stddev, dtype=torch.get_default_dtype())
        if isinstance(stddev, Tensor) and stddev.is_floating_point():
            width = stddev.detach().clone()
        if not bool((width > 0).all()):
            raise ValueError("noise needs a positive standard deviation; use a small one instead")
        if learned:
            self.log_variance = nn.Parameter(2 * width.log())
        else:
            self.register_buffer("log_variance", 2 * width.log())

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """-1/2 [log 2pi + log s^2 + (f - t)^2 / s^2], summed over targets."""
        return self._log_normal((values - columns(target, values)).square())

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """-1/2 [log 2pi + log s^2 + (S + (mu - t)^2) / s^2], summed over targets."""
        mean = flat_mean(output)
        squares = (mean - columns(target, mean)).square()
        return self._log_normal(output.covariance.diagonal() + squares)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log N(t; mu, S + s^2), all targets together with their covariance."""
        mean = flat_mean(output)
        residual = (mean - columns(target, mean))[..., None]
        # Positive definite whatever S is: s^2 > 0.
        noise = torch.diag_embed(self.noise_variance(output))
        factor = torch.linalg.cholesky(output.covariance_matrix + noise)
        whitened = torch.linalg.solve_triangular(factor, residual, upper=False)[..., 0]
        diagonal = factor.diagonal(dim1=-2, dim2=-1)
        return _log_normal(2 * diagonal.log(), whitened.square()).sum(-1)

    def cumulative(self, output: Gaussian, target: Tensor) -> Tensor:
        """P(T <= t) of each target on its own, (*batch, k)."""
        mean = flat_mean(output)
        variance = output.covariance.diagonal() + self.noise_variance(output)
        return cumulative((columns(target, mean) - mean) * variance.rsqrt())

    def cumulative_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """The average of P(T <= t | f) over draws (samples, *batch, k)."""
        precision = (-self.log_variance.to(values) / 2).exp()
        return cumulative((columns(target, values) - values) * precision).mean(0)

    def target(self, output: Gaussian) -> Gaussian:
        """The outputs are the noiseless targets."""
        return output.marginal(slice(None))

    def noise_variance(self, output: Gaussian) -> Tensor:
        """s^2, (*batch, k)."""
        mean = flat_mean(output)
        return self.log_variance.to(mean).exp().expand(mean.shape)

    def predict_draws(self, values: Tensor) -> Prediction:
        """Average and variance of f."""
        noise = self.log_variance.to(values).exp().expand(values.shape)
        return Prediction.of_draws(values, noise)

    def _log_normal(self, squares: Tensor) -> Tensor:
        log_variance = self.log_variance.to(squares)
        return _log_normal(log_variance, squares * exponential(-log_variance)).sum(-1)


def exponential(exponent: Tensor) -> Tensor:
    """exp(x) up to the root of the largest number of the dtype, beyond it the tangent there.

    The bound is 44 in float32 and 354 in float64: no likelihood beyond it is worth comparing, but
    training passes it with finite gradients in the right direction.
    """
    bound = math.log(torch.finfo(exponent.dtype).max) / 2
    return torch.exp(exponent.clamp(max=bound)) * (1 + (exponent - bound).clamp(min=0))


def _log_normal(log_variance: Tensor, squares: Tensor) -> Tensor:
    """log N from the logarithm of the variance and the squared residual in units of it."""
    return -(LOG_2PI + log_variance + squares) / 2


def _log_sum(variance: Tensor, log_variance: Tensor) -> Tensor:
    """log(v + exp(l)), l clamped where its exponential is a number."""
    return (variance + log_variance.clamp(-LARGEST, LARGEST).exp()).log()


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape[-1] % 2:
        raise ValueError(
            f"{values.shape[-1]} outputs are not a mean and a log-variance for each target; give "
            "the network two outputs for each"
        )
    first, second = values.chunk(2, dim=-1)
    return first, second


def _moments(output: Gaussian) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mu_m, mu_l, S_mm, S_ml and S_ll, (*batch, k) each."""
    mean, log_variance = _halves(flat_mean(output))
    of_mean, of_log = output.covariance.diagonal().chunk(2, dim=-1)
    matrix, count = output.covariance_matrix, mean.shape[-1]
    cross = matrix.diagonal(offset=count, dim1=-2, dim2=-1)
    return mean, log_variance, of_mean, cross, of_log
