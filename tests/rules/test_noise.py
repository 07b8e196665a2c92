"""Dropout while training: exact moments by enumerating every mask."""

from collections.abc import Callable
from itertools import product as every
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Diagonal
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close


def enumerated(x: cp.Gaussian, groups: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of x * mask / (1 - p) over all masks of one event; groups share one."""
    mean, second = x.mean.reshape(-1), x.covariance_matrix
    second = second + mean[:, None] * mean[None, :]
    first_total, second_total = torch.zeros_like(mean), torch.zeros_like(second)
    for mask in every((0.0, 1.0), repeat=int(groups.max()) + 1):
        kept = sum(mask)
        probability = (1 - p) ** kept * p ** (len(mask) - kept)
        factor = torch.tensor(mask, dtype=torch.float64)[groups] / (1 - p)
        first_total += probability * factor * mean
        second_total += probability * factor[:, None] * second * factor
    return first_total, second_total - first_total[:, None] * first_total[None, :]


LAYERS: dict[str, tuple[Callable[[float], nn.Module], tuple[int, ...], list[int]]] = {
    "elements": (nn.Dropout, (4,), [0, 1, 2, 3]),
    "elements of a matrix": (nn.Dropout, (2, 2), [0, 1, 2, 3]),
    "channels 1d": (nn.Dropout1d, (3, 2), [0, 0, 1, 1, 2, 2]),
    "channels 1d of one": (nn.Dropout1d, (1, 3, 2), [0, 0, 1, 1, 2, 2]),
    "channels 2d of one": (nn.Dropout2d, (1, 2, 1, 2), [0, 0, 1, 1]),
    "channels 2d of two": (nn.Dropout2d, (2, 2, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3]),
    "channels 3d": (nn.Dropout3d, (2, 1, 1, 3), [0, 0, 0, 1, 1, 1]),
    "channels 3d of one": (nn.Dropout3d, (1, 2, 1, 1, 3), [0, 0, 0, 1, 1, 1]),
}


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("name", LAYERS)
def test_dropout_has_the_moments_of_all_its_masks(name: str, p: float, structure: str) -> None:
    make, shape, groups = LAYERS[name]
    x = gaussian(*shape)
    if structure == "diagonal":
        x = cp.Gaussian.diagonal(x.mean, variance=x.variance)
    y = propagate(make(p).train(), x)
    mean, covariance = enumerated(x, torch.tensor(groups), p)
    assert_close(y.mean.reshape(-1), mean, atol=1e-14)
    assert_close(y.covariance_matrix, covariance, atol=1e-13)


def test_independent_elements_stay_independent() -> None:
    x = cp.Gaussian.isotropic(torch.ones(4, dtype=torch.float64), stddev=1.0)
    assert isinstance(propagate(nn.Dropout(0.3).train(), x).covariance, Diagonal)


@pytest.mark.parametrize("name", ["elements", "channels 2d of one", "channels 1d"])
def test_a_batch_has_masks_of_its_own(name: str) -> None:
    make, shape, groups = LAYERS[name]
    event = shape[1:] if name == "channels 2d of one" else shape
    x = gaussian(*event, batch=(3,))
    y = propagate(make(0.3).train(), x)
    for i in range(3):
        mean, covariance = enumerated(x[i], torch.tensor(groups), 0.3)
        assert_close(y.mean[i].reshape(-1), mean, atol=1e-14)
        assert_close(y.covariance_matrix[i], covariance, atol=1e-13)


def test_three_dimensions_of_dropout2d_are_masked_as_torch_masks_them() -> None:
    """torch reads (N, C, L) and warns; the moments must be those of its masks, or be refused."""
    x = cp.Gaussian.isotropic(torch.ones(1, 2, 2, dtype=torch.float64), stddev=0.0)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="dropout2d"):
        masks = torch.stack([F.dropout2d(x.mean, 0.5) for _ in range(64)]).flatten(1)
    try:
        y = propagate(nn.Dropout2d(0.5).train(), x)
    except cp.UnsupportedOperation:
        return
    shared = (masks[:, :, None] == masks[:, None, :]).all(0)
    assert torch.equal(y.covariance_matrix != 0, shared)


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout])
def test_dropout_in_evaluation_changes_nothing(layer: Callable[[float], nn.Module]) -> None:
    x = gaussian(1, 2, 2, 2) if layer is nn.Dropout2d else gaussian(1, 2, 2)
    y = propagate(layer(0.5).eval(), x)
    assert_close(y.mean, x.mean, rtol=0.0)
    assert_close(y.covariance_matrix, x.covariance_matrix, rtol=0.0)


def test_what_dropout_cannot_carry_is_refused() -> None:
    with pytest.raises(cp.UnsupportedOperation, match="leaves nothing"):
        propagate(nn.Dropout(1.0).train(), gaussian(3))
    with pytest.raises(cp.UnsupportedOperation, match="evaluation"):
        propagate(nn.AlphaDropout(0.5).train(), gaussian(3))


SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "keywords": lambda x: F.dropout(input=x, p=0.3, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout by name": lambda x: torch.dropout(x, p=0.3, train=True),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_the_layer(name: str) -> None:
    x = gaussian(4)
    y, layer = propagate(SPELLINGS[name], x), propagate(nn.Dropout(0.3).train(), x)
    assert_close(y.mean, layer.mean, rtol=0.0)
    assert_close(y.covariance_matrix, layer.covariance_matrix, rtol=0.0)


def test_the_noise_is_new_at_every_call_and_independent_of_its_input() -> None:
    """x - dropout(x) has the noise alone; two dropouts of x share x and no mask."""
    x, p = gaussian(3), 0.4
    noise = p / (1 - p) * (x.variance + x.mean.square())
    alone = propagate(lambda x: x - F.dropout(x, p), x)
    assert_close(alone.covariance_matrix, torch.diag(noise), atol=1e-14)
    two = propagate(lambda x: F.dropout(x, p) - F.dropout(x, p), x)
    assert_close(two.covariance_matrix, torch.diag(2 * noise), atol=1e-14)


class Net(nn.Module):
    """Dropout of elements and of channels among layers that also have a training mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.channels, self.head = nn.Dropout2d(0.2), nn.Linear(12, 2)
        self.elements = nn.Dropout(0.1)
        self.double().eval()

    def forward(self, x: Any) -> Any:
        x = self.channels(torch.relu(self.norm(self.conv(x))))
        return self.head(self.elements(x.flatten(1)))


def test_dropout_active_touches_dropout_layers_alone_and_restores_them() -> None:
    net = Net()
    net.elements.train()
    before = {name: layer.training for name, layer in net.named_modules()}
    with cp.dropout_active(net) as active:
        assert active is net
        now = {name: layer.training for name, layer in net.named_modules()}
        assert now == before | {"channels": True}
    assert {name: layer.training for name, layer in net.named_modules()} == before
    with pytest.raises(RuntimeError, match="stop"), cp.dropout_active(net):
        raise RuntimeError("stop")
    assert {name: layer.training for name, layer in net.named_modules()} == before


def test_sample_free_dropout_agrees_with_sampled_dropout() -> None:
    net = Net()
    mean = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    x = cp.Gaussian(mean, torch.eye(16, dtype=torch.float64)[None] / 100)
    count = 200_000
    with cp.dropout_active(net), torch.no_grad():
        y = propagate(net, x)
        torch.manual_seed(1)  # dropout takes no generator
        sample = net(x.sample(count, torch.Generator().manual_seed(2))[:, 0])
    stddev = sample.std(0)
    standard = (sample - sample.mean(0)) / stddev
    error = stddev * ((standard.pow(4).mean(0) - 1) / (4 * count)).sqrt()
    assert float((error / stddev).max()) < 0.002
    assert bool(((y.mean[0] - sample.mean(0)).abs() <= 5 * stddev / count**0.5).all())
    assert bool(((y.stddev[0] - stddev).abs() <= 5 * error).all())
