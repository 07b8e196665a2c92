"""The paper's networks, with random weights of Kaiming's scale (section 4.2 and appendix C)."""

import torch
from torch import nn


def fully_connected(depth: int, width: int = 100) -> nn.Sequential:
    """FC-4, FC-8: 100 inputs, 100 units in each hidden layer, a scalar output."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return kaiming(nn.Sequential(*hidden, nn.Linear(width, 1)))


def convolutional(depth: int, side: int = 20, channels: int = 10) -> nn.Sequential:
    """CNN-4, CNN-8: 20x20 inputs, 3x3 convolutions of 10 channels, then linear to a scalar."""
    layers: list[nn.Module] = []
    for inputs in (1, *[channels] * (depth - 2)):
        layers += [nn.Conv2d(inputs, channels, 3, padding="same"), nn.ReLU()]
    return kaiming(nn.Sequential(*layers, nn.Flatten(-3), nn.Linear(channels * side**2, 1)))


def mnist(
    side: int = 28, channels: tuple[int, int] = (32, 64), hidden: int = 1024
) -> nn.Sequential:
    """The paper's LeNet, to the logits; 28x28x32 = 25,088 units in its first layer.

    The paper does not print its kernels: 5x5 as in LeNet, 2x2 with stride 2 in place of pooling.
    """
    first, second = channels
    layers = [
        nn.Conv2d(1, first, 5, padding=2), nn.ReLU(),
        nn.Conv2d(first, first, 2, stride=2),
        nn.Conv2d(first, second, 5, padding=2), nn.ReLU(),
        nn.Conv2d(second, second, 2, stride=2),
        nn.Flatten(-3), nn.Linear(second * (side // 4) ** 2, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    ]  # fmt: skip
    return kaiming(nn.Sequential(*layers))


def kaiming(model: nn.Sequential) -> nn.Sequential:
    """Weights of variance 2 / inputs, so that ReLU layers keep the scale; frozen."""
    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return model.to(torch.float64).requires_grad_(False)


def as_torch_does(layer: nn.Module) -> None:
    """Give a layer torch's default weights: for `model.apply`."""
    if isinstance(layer, nn.Linear | nn.Conv2d):
        layer.reset_parameters()
