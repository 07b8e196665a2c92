"""Planned seconds against the processor's time of the propagation, for a dozen networks."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import covprop as cp
from benchmarks.figures import Figure, outcome
from covprop.kernels.compiled import library

ROUNDS, LONGEST = 3, 12.0
"""Times that each is measured, and planned seconds from which it is left out."""
METHODS = {"gaussian layers": cp.GaussianLayers(), "cumulants": cp.Cumulants()}


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


class _Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 12, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


def _chain(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), activation())]
    return nn.Sequential(*parts[:-1])


def _images(channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride, padding=1), nn.ReLU(),
        nn.MaxPool2d(2) if stride == 1 else nn.AvgPool2d(2),
        nn.Flatten(), nn.LazyLinear(10),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "50 and 50 units": (lambda: _chain(20, 50, 50, 5), (1, 20)),
    "800 ReLUs": (lambda: _chain(100, 800, 800, 10), (1, 100)),
    "800 tanh": (lambda: _chain(100, 800, 800, 10, activation=nn.Tanh), (1, 100)),
    "400 GELU, batch of 16": (
        lambda: _chain(100, 400, 400, 10, activation=nn.GELU), (16, 100)
    ),
    "2,000 ReLUs": (lambda: _chain(100, 2000, 2000, 10), (1, 100)),
    "convolutions, max pooling": (lambda: _images(8, 1), (1, 1, 14, 14)),
    "convolutions with stride": (lambda: _images(16, 2), (1, 1, 24, 24)),
    "LSTM, 16 steps": (_Sequence, (1, 16, 4)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (1, 8, 16)
    ),
    "layer norm, SiLU": (
        lambda: nn.Sequential(nn.Linear(200, 300), nn.LayerNorm(300), nn.SiLU(), nn.Linear(300, 9)),
        (1, 200),
    ),
    "30 layers of 60": (lambda: _chain(*[60] * 31), (1, 60)),
    "100 units, batch of 200": (lambda: _chain(100, 100, 100, 100, 1), (200, 100)),
    "residual block": (lambda: _Residual(400), (1, 400)),
}  # fmt: skip


def run(smoke: bool) -> dict[str, Any]:
    """Planned over measured time, float64: within a factor of three for every network."""
    found: dict[str, dict[str, list[float]]] = {}
    figures = []
    for name, method in METHODS.items():
        rows = {}
        for network, (make, shape) in list(NETWORKS.items())[: 2 if smoke else None]:
            pair = _planned_and_measured(make, shape, method)
            if pair is not None:
                rows[network] = list(pair)
        found[name] = rows
        ratios = [planned / measured for planned, measured in rows.values()]
        least, most = min(ratios), max(ratios)
        figures += [
            Figure(f"{name}: least of planned / measured", least, at_least=1 / 3),
            Figure(f"{name}: most of planned / measured", most, at_most=3),
        ]
    return outcome(figures, compiled=library() is not None, seconds=found)


def _planned_and_measured(
    make: Callable[[], nn.Module], shape: tuple[int, ...], method: Any
) -> tuple[float, float] | None:
    model = make().double().eval()
    mean = torch.randn(shape, dtype=torch.float64)
    model(mean)  # which makes lazy layers
    size = mean[0].numel()
    factor = torch.randn(shape[0], size, size, dtype=torch.float64) / size**0.5
    covariance = factor @ factor.mT / 2 + torch.eye(size, dtype=torch.float64) / 10
    x = cp.Gaussian(mean, covariance)
    planned = cp.plan(model, x, method=method).seconds
    if planned > LONGEST:
        return None
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        cp.propagate(model, x, method)
        times.append(time.process_time() - start)
    return planned, min(times)
