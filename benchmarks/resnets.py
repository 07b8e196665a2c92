"""Residual networks of the usual sizes, in plain torch."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

STEM = 64


class Block(nn.Module):
    """Convolutions with batch norm beside a shortcut: two of 3x3, or 1x1, 3x3 and 1x1."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        """A bottleneck where there are more outputs than its width."""
        super().__init__()
        plain = width == outputs
        shapes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        if not plain:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for shape in shapes:
            layers += [*_normalised(*shape), nn.ReLU(inplace=True)]
        self.path = nn.Sequential(*layers[:-1])
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential(*([] if same else _normalised(inputs, outputs, 1, stride)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Both, added."""
        result: Tensor = self.relu(self.path(x) + self.shortcut(x))
        return result


def _normalised(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet(
    blocks: Sequence[int],
    widening: int,
    channels: int = 3,
    stem: int = STEM,
    pool: Callable[..., nn.Module] = nn.MaxPool2d,
) -> nn.Sequential:
    """Four stages of so many blocks; widening: outputs of a block over its width."""
    layers: list[nn.Module] = [
        *_normalised(channels, stem, 7, 2), nn.ReLU(inplace=True), pool(3, 2, 1),
    ]  # fmt: skip
    inputs = stem
    for stage, count in enumerate(blocks):
        width = stem * 2**stage
        for i in range(count):
            stride = 2 if i == 0 and stage > 0 else 1
            layers.append(Block(inputs, width, widening * width, stride))
            inputs = widening * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


resnet18 = partial(resnet, (2, 2, 2, 2), 1)
resnet50 = partial(resnet, (3, 4, 6, 3), 4)


@torch.no_grad()
def normalise(model: nn.Module, images: Tensor) -> nn.Module:
    """Give batch norms the statistics of these images, and freeze the model."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    before = [layer.momentum for layer in norms]
    for layer in norms:
        layer.momentum = 1.0
    model.train()(images)
    for layer, momentum in zip(norms, before, strict=True):
        layer.momentum = momentum
    return model.eval().requires_grad_(False)


def units(model: nn.Module, image: Tensor) -> int:
    """How many ReLUs an image goes through."""
    found: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, y: found.append(y.numel()))
        for layer in model.modules()
        if isinstance(layer, nn.ReLU)
    ]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    return sum(found)
