"""Small versions of well-known architectures in plain torch; nothing here imports covprop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

OUTPUTS = 3


def block(inside: int, outside: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    convolution = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def smooth_block(inside: int, outside: int) -> nn.Sequential:
    """The same with SiLU, which leaves no pixel of a map without any variance."""
    return nn.Sequential(*block(inside, outside)[:2], nn.SiLU())


def head(channels: int) -> nn.Sequential:
    """Global average pooling and a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, OUTPUTS))


def shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    """The identity, or a strided 1x1 convolution where the shape changes."""
    if inside == outside and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


class BasicBlock(nn.Module):
    """He et al. (2016): two 3x3 convolutions and a skip."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.first = block(inside, outside, stride=stride)
        self.second = block(outside, outside)[:2]
        self.skip = shortcut(inside, outside, stride)

    def forward(self, x: Any) -> Any:
        out = self.second(self.first(x))
        out += self.skip(x)
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """He et al. (2016): 1x1, 3x3 and 1x1 convolutions and a skip."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        middle = outside // 2
        self.body = nn.Sequential(
            block(inside, middle, 1),
            block(middle, middle, stride=stride),
            block(middle, outside, 1)[:2],
        )
        self.skip = shortcut(inside, outside, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.skip(x) + self.body(x))


def resnet(kind: Callable[..., nn.Module], width: int) -> nn.Module:
    """A stem, one plain block, one that halves the image, one plain."""
    wide = width + 2
    blocks = kind(width, width), kind(width, wide, 2), kind(wide, wide)
    return nn.Sequential(block(1, width), *blocks, head(wide))


class DenseNet(nn.Module):
    """Huang et al. (2017): every layer sees all before it; a transition halves the image."""

    def __init__(self, growth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.first = nn.ModuleList(self._layer(3 + growth * i, growth) for i in range(3))
        self.transition = nn.Sequential(nn.Conv2d(3 + 3 * growth, 4, 1), nn.AvgPool2d(2))
        self.second = nn.ModuleList(self._layer(4 + growth * i, growth) for i in range(3))
        self.head = head(4 + 3 * growth)

    @staticmethod
    def _layer(inside: int, growth: int) -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm2d(inside), nn.ReLU(), nn.Conv2d(inside, growth, 3, padding=1)
        )

    def forward(self, x: Any) -> Any:
        features = [self.stem(x)]
        for layer in self.first:
            features.append(layer(torch.cat(features, 1)))
        features = [self.transition(torch.cat(features, 1))]
        for layer in self.second:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1))


class UNet(nn.Module):
    """Ronneberger et al. (2015): down, up, and the encoder's maps beside the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([smooth_block(1, 3), smooth_block(3, 4)])
        self.bottom = smooth_block(4, 6)
        self.up = nn.ModuleList([smooth_block(6 + 4, 4), smooth_block(4 + 3, 3)])
        self.last = nn.Conv2d(3, 1, 1)

    def forward(self, x: Any) -> Any:
        skips = []
        for layer in self.down:
            skips.append(layer(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = layer(torch.cat([skips.pop(), x], dim=1))
        return self.last(x).flatten(1)


def vgg() -> nn.Module:
    """Simonyan & Zisserman (2015) with batch norm: convolutions between max poolings."""
    features = block(1, 4), block(4, 4), nn.MaxPool2d(2), block(4, 6), nn.MaxPool2d(2)
    classifier = nn.Linear(24, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, OUTPUTS)
    return nn.Sequential(*features, nn.Flatten(1), *classifier)


class SqueezeExcite(nn.Module):
    """Hu et al. (2018): channels weighted by a gate that has seen the whole image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Any) -> Any:
        gate = torch.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * F.hardsigmoid(self.expand(gate))


class Inverted(nn.Module):
    """Howard et al. (2019): expand, depthwise, squeeze-excite, project, skip."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide))
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide)
        )
        self.gate = SqueezeExcite(wide)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Any) -> Any:
        out = F.hardswish(self.expand(x))
        out = self.gate(F.hardswish(self.depthwise(out)))
        return x + self.project(out)


def mobilenet() -> nn.Module:
    """A strided stem and two inverted residuals."""
    stem = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Hardswish()
    return nn.Sequential(*stem, Inverted(4, 8), Inverted(4, 8), head(4))


class Mixed(nn.Module):
    """Szegedy et al. (2015): branches of several sizes side by side."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([
            block(inside, 2, 1),
            nn.Sequential(block(inside, 2, 1), block(2, 2)),
            nn.Sequential(block(inside, 2, 1), block(2, 2), block(2, 2)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), block(inside, 2, 1)),
        ])  # fmt: skip

    def forward(self, x: Any) -> Any:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def inception() -> nn.Module:
    """A strided stem and two mixed layers."""
    return nn.Sequential(block(1, 3, stride=2), Mixed(3), Mixed(8), head(8))


class GatedMLP(nn.Module):
    """Shazeer (2020): GLU by chunk and product, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 48)])
        self.back = nn.ModuleList([nn.Linear(24, 16), nn.Linear(24, 16)])
        self.last = nn.Linear(16, OUTPUTS)

    def forward(self, x: Any) -> Any:
        for layer, back in zip(self.layers, self.back, strict=True):
            value, gate = layer(x).chunk(2, dim=-1)
            x = x + back(value * torch.sigmoid(gate))
        return self.last(x)


class EncoderBlock(nn.Module):
    """Dosovitskiy et al. (2021): attention and an MLP, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Any) -> Any:
        tokens = self.norms[0](x)
        x = x + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    """Patches of 4 x 4, a class token, two encoder blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(EncoderBlock(width, 2), EncoderBlock(width, 2))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, OUTPUTS))

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.blocks(x)[:, 0])


class SequenceClassifier(nn.Module):
    """Hochreiter & Schmidhuber (1997): what an LSTM remembers at the end of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, OUTPUTS)

    def forward(self, x: Any) -> Any:
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[-1])


@dataclass(frozen=True)
class Architecture:
    """How to make a network, the shape of one input, and the error allowed at small noise."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (1, 8, 8)
    tolerance: float = 0.01

    def build(self) -> nn.Module:
        """Default initialisation, the running statistics of one random batch, evaluation mode."""
        torch.manual_seed(0)
        model = self.make().double().requires_grad_(requires_grad=False)
        model.train()(torch.randn(64, *self.shape, dtype=torch.float64))
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):  # as if that batch had been seen for long
                layer.momentum = 1.0
        model(torch.randn(64, *self.shape, dtype=torch.float64))
        return model.eval()


ARCHITECTURES = {
    "ResNet, basic": Architecture(lambda: resnet(BasicBlock, 4)),
    "ResNet, bottleneck": Architecture(lambda: resnet(Bottleneck, 8)),
    "DenseNet": Architecture(DenseNet),
    "U-Net": Architecture(UNet),
    "VGG": Architecture(vgg),
    "MobileNet": Architecture(mobilenet),
    "Inception": Architecture(inception),
    "gated MLP": Architecture(GatedMLP, (16,)),
    "ViT": Architecture(ViT, tolerance=0.02),
    "LSTM": Architecture(SequenceClassifier, (6, 4)),
}
