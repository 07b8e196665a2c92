"""Whole networks: the paper's against sampling, a linear one to rounding, a deep one in memory."""

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close
from tests.sampled import sampled

PRECISION = 1.8e-3
"""Five standard errors of a standard deviation are 0.9 %."""


def fully_connected(depth: int) -> nn.Module:
    """100 inputs, 100 units in each hidden layer, a scalar output: the paper's FC-4 and FC-8."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(100, 100), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(100, 1))


def convolutional() -> nn.Module:
    """20x20 inputs, three layers of 10 channels, a scalar output: the paper's CNN-4."""
    layers: list[nn.Module] = []
    for channels in (1, 10, 10):
        layers += [nn.Conv2d(channels, 10, 3, padding="same"), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(-3), nn.Linear(4000, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "FC-4": (lambda: fully_connected(4), (100,), 0.1),
    "FC-8": (lambda: fully_connected(8), (100,), 0.1),
    "CNN-4": (convolutional, (1, 20, 20), 0.1),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_the_papers_networks_agree_with_sampling_at_small_noise(name: str) -> None:
    make, shape, noise = NETWORKS[name]
    torch.manual_seed(0)
    model, mean = make(), torch.randn(shape)
    y = propagate(model, cp.Gaussian.isotropic(mean, stddev=noise))
    truth = sampled(model, mean, noise, PRECISION, most=128_000)
    assert abs(float(y.mean) - float(truth.mean)) <= 5 * float(truth.mean_error)
    assert abs(float(y.stddev) - float(truth.stddev)) <= 5 * float(truth.stddev_error)


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=1)])
def test_a_deep_linear_network_is_exact_to_rounding(method: Any) -> None:
    torch.manual_seed(0)
    sizes = (12, 30, 20, 25, 10, 15, 4)
    layers = [nn.Linear(*pair).double() for pair in pairwise(sizes)]
    factor = torch.randn(12, 12, dtype=torch.float64)
    x = cp.Gaussian(torch.randn(12, dtype=torch.float64), factor @ factor.mT)
    product = torch.eye(12, dtype=torch.float64)
    for layer in layers:
        product = layer.weight.detach() @ product
    expected = product @ x.covariance_matrix @ product.mT
    with torch.no_grad():
        y = propagate(nn.Sequential(*layers), x, method)
        assert_close(y.mean, nn.Sequential(*layers)(x.mean), rtol=1e-14)
    assert_close(y.covariance_matrix, expected, atol=1e-14 * float(expected.abs().max()))


def test_a_convolutional_linear_network_is_exact_to_rounding() -> None:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.BatchNorm2d(3), nn.AvgPool2d(2, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 2), nn.Flatten(),
        nn.Linear(18, 4),
    )  # fmt: skip
    model = nn.Sequential(*layers).double().eval()
    factor = torch.randn(2, 36, 36, dtype=torch.float64)
    x = cp.Gaussian(torch.randn(2, 1, 6, 6, dtype=torch.float64), factor @ factor.mT)
    y = propagate(model, x)
    for b in range(2):
        slope = torch.autograd.functional.jacobian(model, x.mean[b : b + 1]).reshape(4, 36)
        expected = slope @ x.covariance_matrix[b] @ slope.mT
        scale = float(expected.abs().max())
        assert_close(y.covariance_matrix[b].detach(), expected, atol=1e-13 * scale)


WIDTH = 300


class Watch(nn.Module):
    """Passes its input on and counts the covariances that are alive at that moment."""

    def __init__(self, known: set[int], counts: list[int]) -> None:
        super().__init__()
        self.known, self.counts = known, counts

    def forward(self, x: Any) -> Any:
        alive = {
            tensor.untyped_storage().data_ptr()
            for tensor in gc.get_objects()
            if type(tensor) is Tensor and tensor.numel() == WIDTH * WIDTH
        }
        self.counts.append(len(alive - self.known))
        return x


@torch.no_grad()
def test_a_chain_of_50_layers_keeps_the_covariances_of_two_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covprop.flow.lineage.UNRELEASED", 0)  # as if they were large
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(50)]
    x = cp.Gaussian(torch.randn(WIDTH), torch.eye(WIDTH))
    known = {layer.weight.untyped_storage().data_ptr() for layer in linear}
    known.add(x.covariance_matrix.untyped_storage().data_ptr())
    counts: list[int] = []
    watch = Watch(known, counts)
    chain = [part for layer in linear for part in (layer, watch, nn.ReLU(), watch)]
    gc.collect()
    gc.freeze()  # only what is made from here on is looked at
    y = propagate(nn.Sequential(*chain), x)
    assert y.covariance_matrix.shape == (WIDTH, WIDTH)
    assert len(counts) == 100
    assert 1 <= min(counts) <= max(counts) <= 2


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, temporary ones but not those known."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch's guard against it takes more than half of the time."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._record(result.untyped_storage())
        elif isinstance(result, list | tuple):
            for tensor in result:
                if isinstance(tensor, Tensor):
                    self._record(tensor.untyped_storage())
        return result

    def _record(self, storage: Any) -> None:
        address = storage._cdata
        if address in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(address)
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.alive -= size


def peak(depth: int) -> int:
    torch.manual_seed(0)
    chain = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model, x = nn.Sequential(*chain), cp.Gaussian(torch.randn(WIDTH), torch.eye(WIDTH))
    with torch.no_grad(), Peak(model.parameters()) as measured:
        propagate(model, x)
    return measured.most


def test_the_peak_of_memory_does_not_grow_with_depth() -> None:
    """Deep enough for correlations near one, whose kernel needs the most temporary memory."""
    matrix = 4 * WIDTH * WIDTH
    shallow, deep = peak(15), peak(50)
    assert shallow > 2 * matrix  # the measure sees the covariances
    # While the program holds the input, which may yet be joined, each ReLU keeps two vectors.
    vectors = (50 - 15) * 2 * 8 * WIDTH
    assert deep <= shallow + vectors + matrix // 10
