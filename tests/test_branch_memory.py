"""What a propagation keeps: a chain its two neighbours, a residual network its live branches."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.carriers import Full
from tests.layers import propagate

pytestmark = pytest.mark.usefixtures("released_at_once")
CHANNELS, SIDE = 4, 5
WIDTH = CHANNELS * SIDE * SIDE


@pytest.fixture
def released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are released as soon as large ones."""
    monkeypatch.setattr("covprop.flow.lineage.UNRELEASED", 0)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Full, Full]]:
    """Every cross-covariance that is asked for."""
    calls: list[tuple[Full, Full]] = []
    plain = Full.cross

    def counted(self: Full, other: Full) -> Tensor | None:
        calls.append((self, other))
        return plain(self, other)

    monkeypatch.setattr(Full, "cross", counted)
    return calls


class Count(nn.Module):
    """Passes its input on and notes how many covariances of WIDTH elements are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.known: set[int] = set()

    def forward(self, x: Any) -> Any:
        tensors = [
            tensor
            for tensor in gc.get_objects()
            if type(tensor) is Tensor and tensor.numel() == WIDTH * WIDTH
        ]
        alive = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.counts.append(len(alive - self.known))
        return x


class Block(nn.Module):
    """A residual block that counts after each of its operations, the inner map having gone."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.count = count

    def forward(self, x: Any) -> Any:
        out = self.count(self.first(x))
        out = self.count(torch.relu(out))
        out = self.count(self.second(out))
        out = out + x
        self.count(x)
        return torch.relu(out)


class Chain(nn.Module):
    """`x = relu(conv(x))`, as a forward is often written."""

    def __init__(self, depth: int, count: Count) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(depth)]
        self.layers, self.count = nn.ModuleList(convolutions), count

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.relu(layer(x))
            self.count(x)
        return x


def counts(make: Callable[[Count], nn.Module]) -> list[int]:
    torch.manual_seed(0)
    count = Count()
    model = make(count).requires_grad_(requires_grad=False)
    x = cp.Gaussian(torch.randn(1, CHANNELS, SIDE, SIDE), torch.eye(WIDTH))
    count.known = {x.covariance_matrix.untyped_storage().data_ptr()}
    gc.collect()
    gc.freeze()  # only what is made from here on is looked at
    propagate(model, x)
    return count.counts


def sequential(count: Count) -> nn.Module:
    layers = []
    for _ in range(8):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), count, nn.ReLU(), count]
    return nn.Sequential(*layers)


def test_a_sequential_chain_keeps_two_covariances(crossings: list[Any]) -> None:
    found = counts(sequential)
    assert len(found) == 16
    assert max(found) <= 2
    assert not crossings


def test_a_chain_of_reassigned_names_keeps_three_covariances(crossings: list[Any]) -> None:
    found = counts(lambda count: Chain(8, count))
    assert len(found) == 8
    assert max(found) <= 3
    assert not crossings


def test_a_residual_network_keeps_what_its_live_branches_need(crossings: list[Any]) -> None:
    """The skip, the current tensor, and one more for the frames that still hold an argument."""
    found = counts(lambda count: nn.Sequential(*(Block(count) for _ in range(8))))
    assert len(found) == 32
    assert max(found) <= 4
    assert max(found[-8:]) <= max(found[:8])
    assert len(crossings) == 8


def test_a_residual_network_of_any_depth_needs_the_same_memory() -> None:
    def most(depth: int) -> int:
        return max(counts(lambda count: nn.Sequential(*(Block(count) for _ in range(depth)))))

    assert most(8) == most(2)


def test_long_skips_keep_one_covariance_each() -> None:
    """Three encoder levels that a decoder adds later."""
    held: list[int] = []

    class Net(nn.Module):
        def __init__(self, count: Count) -> None:
            super().__init__()
            self.count = count
            self.layers = nn.ModuleList(
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(6)
            )

        def forward(self, x: Any) -> Any:
            skips = []
            for layer in self.layers[:3]:
                x = torch.relu(layer(x))
                skips.append(x)
            for layer in self.layers[3:]:
                x = torch.relu(layer(x) + skips.pop())
                self.count(x)
                held.append(len(skips))
            return x

    found = counts(Net)
    assert held == [2, 1, 0]
    # Beside the skips: the tensor, its argument, the sum before it, the skip that just joined.
    assert all(number <= skips + 4 for number, skips in zip(found, held, strict=True))


@pytest.mark.parametrize("norm", [nn.Identity, nn.LayerNorm], ids=["relu", "layer norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chain_keeps_as_much_in_every_dtype_and_after_every_layer(
    norm: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    """Nothing that outlives an operation may hold its matrix: no tensor, no view of a diagonal.

    A norm of all elements has a matrix of its own, its expected slope, by which what comes of it
    depends on the input.
    """
    counts = []
    for depth in (2, 6):
        torch.manual_seed(0)
        count = Count()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU(), count]
        model = nn.Sequential(*layers).to(dtype).requires_grad_(requires_grad=False)
        count.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        x = cp.Gaussian.isotropic(torch.randn(WIDTH, dtype=dtype), stddev=0.01)
        propagate(model, x)
        counts.append(max(count.counts))
    assert counts[1] <= counts[0] + (0 if norm is nn.Identity else 6 - 2)
