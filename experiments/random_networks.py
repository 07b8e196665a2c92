"""Random networks: small ones of any activation with skip connections, and wide ones of ReLU."""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made
    for made in (
        nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
        nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.ReLU6,
        nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink,
    )
}  # fmt: skip
"""Smooth and piecewise linear functions of one number that torch.nn has."""
LAYERS, WIDTHS, NOISES = (2, 6), (2, 64), (0.1, 2.0)
"""Smallest and largest."""
SKIPS, BIAS = 0.4, 0.3
"""The share of networks with skip connections, and the deviation of biases."""


@final
class Description(NamedTuple):
    """What was drawn; a hidden layer has an activation, the last has none."""

    widths: list[int]
    activations: list[str]
    skips: bool
    noise: float


@final
class Residual(nn.Module):
    """A layer beside the identity, or beside a projection where widths differ."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        left, right = self.layer(x), self.skip(x)
        return left + right  # type: ignore[no-any-return]


def draw() -> Description:
    """By torch's global generator; half of the layers with a skip connection keep their width."""
    layers = _whole(*LAYERS)
    skips = bool(torch.rand(()) < SKIPS)
    widths = [_whole(*WIDTHS), _whole(*WIDTHS)]
    for _ in range(layers - 2):
        same = skips and bool(torch.rand(()) < 1 / 2)
        widths.append(widths[-1] if same else _whole(*WIDTHS))
    names = list(ACTIVATIONS)
    activations = [names[_whole(0, len(names) - 1)] for _ in range(layers - 1)]
    low, high = (math.log(noise) for noise in NOISES)
    noise = math.exp(low + (high - low) * float(torch.rand(())))
    return Description([*widths, _whole(*WIDTHS)], activations, skips, noise)


def build(drawn: Description) -> nn.Sequential:
    """Kaiming's weights in float64; skip connections around all hidden layers but the first."""
    parts: list[nn.Module] = []
    for place, name in enumerate(drawn.activations):
        inputs, outputs = drawn.widths[place : place + 2]
        layer = nn.Sequential(nn.Linear(inputs, outputs), ACTIVATIONS[name]())
        residual = drawn.skips and place > 0
        parts.append(Residual(layer, inputs, outputs) if residual else layer)
    parts.append(nn.Linear(*drawn.widths[-2:]))
    return _initialised(nn.Sequential(*parts), BIAS).double()


def wide(width: int, depth: int) -> nn.Sequential:
    """He's weights, no biases, and a ReLU after every layer."""
    layers = [(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(depth)]
    return _initialised(nn.Sequential(*(part for layer in layers for part in layer)), 0.0)


def _whole(low: int, high: int) -> int:
    """Uniform, both ends included."""
    return int(torch.randint(low, high + 1, ()))


def _initialised(model: nn.Sequential, bias: float) -> nn.Sequential:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.normal_(module.bias, std=bias)
    return model.requires_grad_(requires_grad=False).eval()
