"""Layers with factorised Gaussian weights and biases, in place of torch's."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from covprop.bayes.geometry import Convolved, Dot, Geometry
from covprop.bayes.moments import propagated
from covprop.bayes.priors import Prior
from covprop.bayes.weights import Weights
from covprop.dispatch import (
    AT_MEANS,
    BATCH,
    KIND,
    RANDOM_WEIGHTS,
    RULES,
    SOURCE,
    TWICE,
    Batch,
)
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import standard_deviation
from covprop.tensor import GaussianTensor


class BayesLayer(Weights, ABC):
    """A linear layer whose weights and biases are independent Gaussians.

    An in-flight Gaussian goes through with its exact mean and covariance. A plain tensor, which has
    the batch first, gets one draw of the output for every element of the batch, each with weights
    of its own.
    """

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """How outputs see inputs."""

    def forward(self, input: Any) -> Any:
        """The Gaussian of the output, or a draw of it."""
        if has_torch_function((input,)):  # an in-flight Gaussian, or something watches
            return handle_torch_function(random_linear, (input,), input, self.kernel, self)
        return draw(input, self)


def random_linear(input: Tensor, weight: Tensor, layer: BayesLayer) -> Tensor:
    """A Bayesian layer, as all operations see it."""
    del weight
    return draw(input, layer)


def at_means(input: Tensor, weight: Tensor, layer: BayesLayer) -> Tensor:
    """The same with the mean weights."""
    del weight
    return layer.geometry.apply(
        input, layer.weight_mean, layer.bias_mean, layer.members is not None
    )


def source(input: Tensor, weight: Tensor, layer: BayesLayer) -> object:
    """What its weights are known by, unless several uses are declared."""
    del input, weight
    return None if layer.shared else layer.weight_mean


def random_linear_rule(
    function: Any, input: GaussianTensor, weight: Tensor, layer: BayesLayer
) -> GaussianTensor:
    """Moments of the output; the noise of the weights may enter once."""
    del function, weight
    _check(input.loc, len(input.batch_shape), layer)
    if not layer.shared and not input.lineage.claim(layer.weight_mean):
        raise UnsupportedOperation(TWICE)
    return propagated(input, layer.geometry, layer)


RULES[random_linear], AT_MEANS[random_linear] = random_linear_rule, at_means
BATCH[random_linear], KIND[random_linear] = Batch.FIRST, RANDOM_WEIGHTS
SOURCE[random_linear] = source


def draw(x: Tensor, layer: BayesLayer, generator: torch.Generator | None = None) -> Tensor:
    """The output for weights drawn anew for every element of the batch, the first dimension.

    Where every weight meets one input, the output itself is drawn, as its elements are independent:
    local reparametrisation (Kingma et al. 2015). Where weights are used in several positions, they
    are drawn for every element of the batch: independent outputs would be another distribution.
    """
    geometry, members = layer.geometry, layer.members is not None
    lead = min(int(members) + 1, x.dim() - geometry.event_dims)
    _check(x, lead, layer)
    mean = geometry.apply(x, layer.weight_mean, layer.bias_mean, members)
    if geometry.positions(layer.kernel, x.shape[lead:]) == 1:
        variance = geometry.apply(x.square(), layer.weight_variance, layer.bias_variance, members)
        return mean + standard_deviation(variance) * _normal(mean.shape, mean, generator)
    count, batch = x.shape[:lead].numel(), x.shape[:lead]

    def deviations(log_stddev: Tensor) -> Tensor:
        shape = log_stddev.shape[int(members) :]
        each = log_stddev[:, None] if members else log_stddev
        drawn = torch.exp(each) * _normal((*batch, *shape), mean, generator)
        return drawn.reshape(count, *shape)

    bias = None if layer.bias_log_stddev is None else deviations(layer.bias_log_stddev)
    weight = deviations(layer.weight_log_stddev)
    return mean + geometry.apply(
        x.reshape(count, 1, *x.shape[lead:]), weight, bias, members=True
    ).reshape(mean.shape)


def _normal(shape: Any, like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def _check(x: Tensor, batch_dims: int, layer: BayesLayer) -> None:
    """Members lead, and the event is one that the layer takes."""
    event = x.shape[batch_dims:]
    kernel, dims = layer.kernel, layer.geometry.event_dims
    if layer.members is not None and (not batch_dims or x.shape[0] != layer.members):
        raise UnsupportedOperation(
            f"a layer of {layer.members} members takes tensors of shape ({layer.members}, batch, "
            f"...), and this one has {tuple(x.shape)}, of which {tuple(x.shape[:batch_dims])} is "
            "the batch"
        )
    if isinstance(layer.geometry, Convolved):
        channels = kernel.shape[1] * layer.geometry.groups
        if len(event) != dims or event[0] != channels:
            raise UnsupportedOperation(
                f"a Bayesian convolution takes {channels} channels and {dims - 1} dimensions of "
                f"places, and one event here has the shape {tuple(event)}"
            )
    elif len(event) < 1 or event[-1] != kernel.shape[1]:
        raise UnsupportedOperation(
            f"a Bayesian linear layer takes {kernel.shape[1]} features, and one event here has the "
            f"shape {tuple(event)}"
        )


@final
class BayesLinear(BayesLayer):
    """`nn.Linear` with random weights and biases.

    prior: `HePrior()` if not given; members: how many networks are computed together, with
    parameters (members, ...) and inputs (members, batch, ...); shared: allow several uses in one
    pass, and take them as independent, which they are not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        prior: Prior | None = None,
        members: int | None = None,
        shared: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Begin as `nn.Linear` does, with small deviations."""
        super().__init__(
            (out_features, in_features), out_features, bias=bias, prior=prior, members=members,
            shared=shared, device=device, dtype=dtype,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features

    geometry = Dot()

    def extra_repr(self) -> str:
        """As nn.Linear, and what is random."""
        bias = self.bias_mean is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, prior={self.prior}"


class _BayesConv(BayesLayer, ABC):
    """What convolutions of one and two dimensions share."""

    dims: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        prior: Prior | None = None,
        members: int | None = None,
        shared: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Begin as torch's convolutions do, with small deviations."""
        dims = self.dims
        kernel = _each(kernel_size, dims)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{groups} groups do not divide {in_channels} and {out_channels} channels"
            )
        super().__init__(
            (out_channels, in_channels // groups, *kernel),
            out_channels // groups * math.prod(kernel),
            bias=bias, prior=prior, members=members, shared=shared, device=device, dtype=dtype,
        )  # fmt: skip
        self.in_channels, self.out_channels = in_channels, out_channels
        around = padding if isinstance(padding, str) else _each(padding, dims)
        self._geometry = Convolved(dims, _each(stride, dims), around, _each(dilation, dims), groups)

    @property
    def geometry(self) -> Convolved:
        """The places that the kernel is at."""
        return self._geometry

    def extra_repr(self) -> str:
        """Channels, places and what is random."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={tuple(self.kernel.shape[2:])}, "
            f"bias={self.bias_mean is not None}, {self._geometry}, prior={self.prior}"
        )


@final
class BayesConv1d(_BayesConv):
    """`nn.Conv1d` with random weights and biases, zeros around; options as of `BayesLinear`."""

    dims = 1


@final
class BayesConv2d(_BayesConv):
    """`nn.Conv2d` with random weights and biases, zeros around; options as of `BayesLinear`."""

    dims = 2


def _each(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    each = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(each) != dims:
        raise ValueError(f"{each} is not one number for each of {dims} dimensions")
    return each
