"""The random parameters of a layer: independent Gaussians, each with a mean and a deviation."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from covprop.bayes.priors import HePrior, Posterior, Prior

INITIAL_RATIO = 0.1
"""Deviation of a new weight, in units of 1 / sqrt(fan_in), about the size of the weights."""


class Weights(nn.Module):
    """Means and log-deviations of weights and biases, their prior, and how they are used.

    members: how many networks are computed together; shared: whether uses of the layer in one
    pass are taken as independent.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        fan_out: int,
        *,
        bias: bool,
        prior: Prior | None,
        members: int | None,
        shared: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make parameters for weights of a shape, outputs first."""
        super().__init__()
        if members is not None and (type(members) is not int or members < 1):
            raise ValueError(f"members is a whole number from 1 or None, not {members!r}")
        self.prior = HePrior() if prior is None else prior
        if not isinstance(self.prior, Prior):
            raise TypeError(f"a prior is an object such as bayes.HePrior(), not {prior!r}")
        self.members, self.shared = members, shared
        self.fan_in, self.fan_out = math.prod(shape[1:]), fan_out
        lead = () if members is None else (members,)

        def new(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty((*lead, *size), device=device, dtype=dtype))

        self.weight_mean, self.weight_log_stddev = new(*shape), new(*shape)
        self.bias_mean: nn.Parameter | None = new(shape[0]) if bias else None
        self.bias_log_stddev: nn.Parameter | None = new(shape[0]) if bias else None
        self.weight_centre: Tensor | None
        self.bias_centre: Tensor | None
        self.register_buffer("weight_centre", None)
        self.register_buffer("bias_centre", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Means as torch's layers begin, deviations a tenth of their size."""
        bound = 1 / math.sqrt(max(1, self.fan_in))
        for mean, log_stddev in self._pairs():
            mean.uniform_(-bound, bound, generator=generator)
            log_stddev.fill_(math.log(INITIAL_RATIO * bound))

    def __getattr__(self, name: str) -> Any:
        """Say what there is where a module takes the weights of its layers for itself."""
        if name in ("weight", "bias"):
            raise AttributeError(
                f"a Bayesian layer has no {name}: {name}_mean and {name}_variance are its moments; "
                "for nn.TransformerEncoderLayer in eval mode, which reads it for a faster way, "
                "call torch.backends.mha.set_fastpath_enabled(False)"
            )
        return super().__getattr__(name)

    @property
    def kernel(self) -> Tensor:
        """The mean weights of one network."""
        return self.weight_mean if self.members is None else self.weight_mean[0]

    @property
    def weight_variance(self) -> Tensor:
        """Variances of the weights."""
        return torch.exp(2 * self.weight_log_stddev)

    @property
    def bias_variance(self) -> Tensor | None:
        """Variances of the biases, None without a bias."""
        return None if self.bias_log_stddev is None else torch.exp(2 * self.bias_log_stddev)

    def posteriors(self) -> Iterator[Posterior]:
        """Of the weights, and of the biases."""
        centres = (self.weight_centre, self.bias_centre)
        for (mean, log_stddev), centre in zip(self._pairs(), centres, strict=False):
            yield Posterior(
                mean, log_stddev, self.fan_in, self.fan_out, self.members is not None, centre
            )

    def divergence(self) -> Tensor:
        """From the prior, of weights and biases: one number, or (members,)."""
        parts = [self.prior.divergence(posterior) for posterior in self.posteriors()]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.weight_mean, self.weight_log_stddev
        if self.bias_mean is not None and self.bias_log_stddev is not None:
            yield self.bias_mean, self.bias_log_stddev
