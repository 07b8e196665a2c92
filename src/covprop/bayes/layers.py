"""Layers with factorised Gaussian weights and biases, in place of torch's."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from covprop.bayes.priors import HePrior, Posterior, Prior
from covprop.covariance import LinearMap
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import standard_deviation
from covprop.rules.layers import Convolution, Linear

INITIAL_RATIO = 0.1
"""Standard deviation of a new weight, in units of 1 / sqrt(fan_in)."""


class BayesLayer(nn.Module, ABC):
    """A linear layer whose weights and biases are independent Gaussians.

    A plain tensor, which has the batch first, gives one draw of the output for every element of the
    batch, each with weights of its own; `moments.py` has the rule for in-flight Gaussians.
    """

    event_dims: int
    """Dimensions of the smallest event that the layer takes."""

    def __init__(
        self, shape: tuple[int, ...], fan_out: int, *, bias: bool, prior: Prior | None,
        members: int | None, shared: bool, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
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
        # Where the prior is centred, if not at zero.
        self.weight_centre: Tensor | None
        self.bias_centre: Tensor | None
        self.register_buffer("weight_centre", None)
        self.register_buffer("bias_centre", None)
        self.reset_parameters()

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the layer with these weights, or with weights (members, ...) to inputs of each."""

    @abstractmethod
    def structure(self, event_shape: torch.Size) -> Linear | Convolution:
        """Return the structured map of the mean weights of one network."""

    @abstractmethod
    def positions(self, event_shape: torch.Size) -> int:
        """Count the positions of the event in which the weights are used."""

    @abstractmethod
    def taps(self, event_shape: torch.Size) -> Tensor:
        """Index the inputs that each weight meets, from 1, 0 for padding: (t, positions)."""

    @abstractmethod
    def _check_event(self, event: torch.Size) -> None: ...

    def forward(self, input: Any) -> Any:
        """Return the Gaussian of the output for an in-flight Gaussian, else a draw of it."""
        if has_torch_function((input,)):
            return handle_torch_function(random_linear, (input,), input, self.kernel, self)
        return self.draw(input)

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw the output for new weights for every element of the batch, the first dimension.

        Where every weight meets one input, the elements of the output are independent and are drawn
        themselves: local reparametrisation (Kingma et al. 2015). Where weights are used in several
        positions, they are drawn, as independent outputs would be another distribution.
        """
        lead = min(int(self.members is not None) + 1, x.dim() - self.event_dims)
        self.check_input(x, lead)
        mean = self.linear(x, self.weight_mean, self.bias_mean)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)

        batch, event, count = x.shape[:lead], x.shape[lead:], x.shape[:lead].numel()
        if self.positions(event) == 1:
            variance = self.linear(x.square(), self.weight_variance, self.bias_variance)
            return mean + standard_deviation(variance) * normal(mean.shape)

        def deviations(log_stddev: Tensor) -> Tensor:
            if self.members is not None:
                log_stddev = log_stddev[:, None]
            shape = log_stddev.shape[0 if self.members is None else 2 :]
            return (torch.exp(log_stddev) * normal((*batch, *shape))).reshape(count, *shape)

        bias = None if self.bias_log_stddev is None else deviations(self.bias_log_stddev)
        weight = deviations(self.weight_log_stddev)
        return mean + self.linear(x.reshape(count, 1, *event), weight, bias).reshape(mean.shape)

    def check_input(self, x: Tensor, batch_dims: int) -> None:
        """Refuse an input whose members or event the layer does not take."""
        if self.members is not None and (not batch_dims or x.shape[0] != self.members):
            raise UnsupportedOperation(
                f"a layer of {self.members} members takes tensors of shape ({self.members}, batch, "
                f"...), and this one has {tuple(x.shape)}, of which {tuple(x.shape[:batch_dims])} "
                "is the batch"
            )
        self._check_event(x.shape[batch_dims:])

    def linear_map(self, event_shape: torch.Size) -> LinearMap:
        """Return the mean weights as a linear map of the event."""
        mean, ensemble = self.weight_mean, self.members is not None
        return LinearMap(
            lambda v: self.linear(v, mean), event_shape, leading=ensemble,
            layer=None if ensemble else self.structure(event_shape),
            squared=lambda v: self.linear(v, mean.square()),
        )  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise means as torch's layers do, and deviations to a tenth of their size."""
        bound = 1 / math.sqrt(max(1, self.fan_in))
        for _, mean, log_stddev in self.named_moments():
            mean.uniform_(-bound, bound, generator=generator)
            log_stddev.fill_(math.log(INITIAL_RATIO * bound))

    def __getattr__(self, name: str) -> Any:
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

    def named_moments(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Iterate over the names, means and log-deviations of the weights and of the biases."""
        yield "weight", self.weight_mean, self.weight_log_stddev
        if self.bias_mean is not None and self.bias_log_stddev is not None:
            yield "bias", self.bias_mean, self.bias_log_stddev

    def posteriors(self) -> Iterator[Posterior]:
        """Iterate over the posteriors of the weights and of the biases."""
        for name, mean, log_stddev in self.named_moments():
            yield Posterior(
                mean, log_stddev, self.fan_in, self.fan_out, self.members is not None,
                centre=getattr(self, f"{name}_centre"),
            )  # fmt: skip

    def divergence(self) -> Tensor:
        """Return the divergence from the prior: one number, or (members,)."""
        first, *rest = (self.prior.divergence(posterior) for posterior in self.posteriors())
        return first + rest[0] if rest else first


def random_linear(input: Tensor, _weight: Tensor, layer: BayesLayer) -> Tensor:
    """Apply a Bayesian layer: the operation that rules, plans and traces see."""
    return layer.draw(input)


@final
class BayesLinear(BayesLayer):
    """`nn.Linear` with random weights and biases.

    Args:
        in_features: Features of an input.
        out_features: Features of an output.
        bias: Whether there are biases.
        prior: The prior of the weights, `HePrior()` by default.
        members: How many networks are computed together, with parameters (members, ...) and inputs
            (members, batch, ...); None for one.
        shared: Allow several uses in one pass, treated as independent although they are not.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        layer = bayes.BayesLinear(3, 2)
        y = cp.propagate(layer, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1))
    """

    event_dims = 1

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        prior: Prior | None = None, members: int | None = None, shared: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            (out_features, in_features), out_features, bias=bias, prior=prior, members=members,
            shared=shared, device=device, dtype=dtype,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x + b."""
        if weight.dim() == 2:  # noqa: PLR2004
            return F.linear(x, weight, bias)
        rows = x if x.dim() == weight.dim() else x.reshape(len(x), -1, x.shape[-1])
        transposed = weight.mT
        y = rows @ transposed if bias is None else torch.baddbmm(bias[:, None], rows, transposed)
        return y if rows is x else y.reshape(*x.shape[:-1], y.shape[-1])

    def structure(self, event_shape: torch.Size) -> Linear:  # noqa: ARG002
        """Return the weights: they are the matrix."""
        return Linear(self.kernel)

    def positions(self, event_shape: torch.Size) -> int:
        """Count the elements of all dimensions but the last."""
        return event_shape[:-1].numel()

    def taps(self, event_shape: torch.Size) -> Tensor:
        """Index feature j of position p."""
        numbers = torch.arange(1, event_shape.numel() + 1, device=self.kernel.device)
        return numbers.reshape(-1, event_shape[-1]).T

    def _check_event(self, event: torch.Size) -> None:
        if len(event) < 1 or event[-1] != self.in_features:
            raise UnsupportedOperation(
                f"a Bayesian linear layer takes {self.in_features} features, and one event here "
                f"has the shape {tuple(event)}"
            )

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with its prior."""
        bias = self.bias_mean is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, prior={self.prior}"


class _BayesConv(BayesLayer, ABC):
    dims: ClassVar[int]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1, padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1, groups: int = 1, bias: bool = True, *,
        prior: Prior | None = None, members: int | None = None, shared: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        kernel = _each(kernel_size, self.dims)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{groups} groups do not divide {in_channels} and {out_channels} channels"
            )
        super().__init__(
            (out_channels, in_channels // groups, *kernel),
            out_channels // groups * math.prod(kernel),
            bias=bias, prior=prior, members=members, shared=shared, device=device, dtype=dtype,
        )  # fmt: skip
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.stride, self.dilation = _each(stride, self.dims), _each(dilation, self.dims)
        self.padding = padding if isinstance(padding, str) else _each(padding, self.dims)
        self.event_dims = self.dims + 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve; members are groups of channels."""
        function: Callable[..., Tensor] = F.conv1d if self.dims == 1 else F.conv2d
        options = (self.stride, self.padding, self.dilation)
        batch, event = x.shape[: -self.event_dims], x.shape[-self.event_dims :]
        if weight.dim() == self.dims + 2:
            y = function(x.reshape(-1, *event), weight, bias, *options, self.groups)
            return y.reshape(*batch, *y.shape[1:])
        count = len(weight)
        channels = x.reshape(count, -1, *event).transpose(0, 1).flatten(1, 2)
        offset = None if bias is None else bias.flatten()
        y = function(channels, weight.flatten(0, 1), offset, *options, count * self.groups)
        y = y.unflatten(1, (count, -1)).transpose(0, 1)
        return y.reshape(*batch, *y.shape[2:])

    def structure(self, event_shape: torch.Size) -> Convolution:
        """Return the convolution of a plane; a line is a plane of one row."""
        weight = self.kernel
        if self.dims == 1:
            weight, event_shape = (
                weight[:, :, None],
                torch.Size((event_shape[0], 1, event_shape[1])),
            )
        padding = self.padding if isinstance(self.padding, str) else _plane(self.padding, 0)
        stride, dilation = _plane(self.stride, 1), _plane(self.dilation, 1)
        return Convolution(weight, event_shape, stride, padding, dilation, self.groups)

    def positions(self, event_shape: torch.Size) -> int:
        """Count the places of one channel of the output."""
        return self.structure(event_shape).places

    def taps(self, event_shape: torch.Size) -> Tensor:
        """Index the inputs under the kernel at each place, channel by channel."""
        return self.structure(event_shape).taps

    def _check_event(self, event: torch.Size) -> None:
        if len(event) != self.event_dims or event[0] != self.in_channels:
            raise UnsupportedOperation(
                f"a Bayesian convolution takes {self.in_channels} channels and {self.dims} "
                f"dimensions of places, and one event here has the shape {tuple(event)}"
            )

    def extra_repr(self) -> str:
        """Describe the layer as torch's convolutions do, with its prior."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={tuple(self.kernel.shape[2:])}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias_mean is not None}, prior={self.prior}"
        )


@final
class BayesConv1d(_BayesConv):
    """`nn.Conv1d` with random weights and biases, and zeros as padding.

    Args:
        in_channels: Channels of an input.
        out_channels: Channels of an output.
        kernel_size: Size of the kernel, a number.
        stride: Step of the kernel.
        padding: Zeros at both ends of the dimension.
        dilation: Distance of the elements that the kernel takes.
        groups: How many groups of channels are convolved separately.
        bias: Whether there are biases.
        prior: The prior of the weights, `HePrior()` by default.
        members: How many networks are computed together, as for `BayesLinear`.
        shared: Allow several uses in one pass, as for `BayesLinear`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        layer = bayes.BayesConv1d(1, 4, 3, prior=bayes.XavierPrior())
        y = bayes.predict(layer, torch.zeros(8, 1, 20))
    """

    dims = 1


@final
class BayesConv2d(_BayesConv):
    """`nn.Conv2d` with random weights and biases, and zeros as padding.

    Args:
        in_channels: Channels of an input.
        out_channels: Channels of an output.
        kernel_size: Size of the kernel, a number, or a pair.
        stride: Step of the kernel.
        padding: Zeros at both ends of each dimension.
        dilation: Distance of the elements that the kernel takes.
        groups: How many groups of channels are convolved separately.
        bias: Whether there are biases.
        prior: The prior of the weights, `HePrior()` by default.
        members: How many networks are computed together, as for `BayesLinear`.
        shared: Allow several uses in one pass, as for `BayesLinear`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        layer = bayes.BayesConv2d(3, 8, kernel_size=3, padding=1)
        y = bayes.predict(layer, torch.zeros(2, 3, 16, 16))
    """

    dims = 2


def _each(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    each = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(each) != dims:
        raise ValueError(f"{each} is not one number for each of {dims} dimensions")
    return each


def _plane(values: tuple[int, ...], missing: int) -> tuple[int, int]:
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])
