"""PL-DNN: two linearisations and one exact ReLU."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.methods import Network
from covprop.methods.comparison import piecewise
from tests.layers import propagate
from tests.oracles import assert_close, moments, pair_covariance
from tests.test_propagate import assert_same, gaussian

D = torch.float64
PL = cp.PiecewiseLinear()


def network(*widths: int, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(4)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers[:-1]).to(D).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_one_hidden_layer_is_exact(batch: tuple[int, ...]) -> None:
    model, x = network(4, 6, 3), gaussian(*batch)
    assert_same(propagate(model, x, PL), propagate(model, x), 1e-14)


def by_hand(model: nn.Sequential, split: int, x: cp.Gaussian) -> tuple[Tensor, Tensor]:
    """Both Jacobians by autograd, the moments of the ReLU by quadrature, pair by pair."""
    first, rest = model[:split], model[split + 1 :]
    y = first(x.mean)
    a = torch.autograd.functional.jacobian(first, x.mean)
    z = torch.relu(y)
    b = torch.autograd.functional.jacobian(rest, z)
    inner = a @ x.covariance_matrix @ a.mT
    s = inner.diagonal().sqrt()
    places, widths = y.tolist(), s.tolist()
    alone = [moments(torch.relu, *both, kinks=(0.0,)) for both in zip(places, widths, strict=True)]
    mean = torch.tensor([moment[0] for moment in alone], dtype=D)
    covariance = torch.diag(torch.tensor([moment[1] for moment in alone], dtype=D))
    for i in range(len(y)):
        for j in range(i):
            rho = float(inner[i, j] / (s[i] * s[j]))
            covariance[i, j] = covariance[j, i] = pair_covariance(
                torch.relu, (places[i], places[j]), (widths[i], widths[j]), rho, (0.0,)
            )
    return rest(z) + b @ (mean - z), b @ covariance @ b.mT


@pytest.mark.parametrize(("layer", "split"), [(None, 3), (-1, 5), (0, 1), (1, 3), ("3", 3)])
def test_it_is_what_one_calculates_by_hand(layer: Any, split: int) -> None:
    model, x = network(4, 9, 8, 4, 2), gaussian()  # wide: units must be active before the last
    y = propagate(model, x, cp.PiecewiseLinear(layer))
    mean, covariance = by_hand(model, split, x)
    assert_close(y.mean, mean, atol=1e-12)
    assert_close(y.covariance_matrix, covariance, atol=5e-9)  # the oracle, beyond rho = 0.99


def test_zero_means_are_those_of_the_first_publication() -> None:
    """Their covariance of ReLUs of zero mean is the arc-cosine kernel less the means' product."""
    model, x = network(4, 6, 2), gaussian()
    a, b = model[0].weight, model[2].weight
    inner = a @ x.covariance_matrix @ a.mT
    s = inner.diagonal().sqrt()
    rho = (inner / torch.outer(s, s)).clamp(-1, 1)
    kernel = (1 - rho.square()).sqrt() + rho * (torch.pi / 2 + torch.asin(rho))
    covariance = torch.outer(s, s) * (kernel - 1) / (2 * torch.pi)
    y = propagate(model, x, cp.PiecewiseLinear(zero_mean=True))
    assert_close(y.covariance_matrix, b @ covariance @ b.mT, atol=1e-9)  # asin near one
    exact = propagate(model, x, PL)
    assert_close(y.mean, exact.mean, atol=1e-15)
    assert float((y.variance / exact.variance - 1).abs().max()) > 0.05


def test_a_batch_is_its_elements() -> None:
    model, x = network(4, 6, 5, 3), gaussian(3)
    together = propagate(model, x, PL)
    for i, element in enumerate(x):
        assert_same(together[i], propagate(model, element, PL), 1e-14)


def test_the_batch_may_be_elsewhere_at_the_relu() -> None:
    a, b = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3), torch.linspace(1, -1, 6, dtype=D)

    def moved(x: Any) -> Any:
        return torch.relu((x @ a).transpose(0, 1)).transpose(0, 1) @ b.reshape(3, 2)

    x = gaussian(3)
    assert_same(propagate(moved, x, PL), propagate(moved, x), 1e-14)


def test_small_noise_is_linear_where_no_unit_is_at_its_kink() -> None:
    model, x = network(4, 6, 5, 3), gaussian()
    small = cp.Gaussian(x.mean, 1e-12 * x.covariance_matrix)
    found, linear = (propagate(model, small, method) for method in (PL, cp.Linearized()))
    assert_close(found.covariance_matrix, linear.covariance_matrix, rtol=1e-9, atol=1e-24)


class Functional(nn.Module):
    """ReLU in several spellings, one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linears = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)]).to(D)
        self.twice = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        constant = torch.relu(torch.ones(4, dtype=D))  # no layer: it does not depend on x
        x = F.relu(self.linears[0](x)) * constant
        x = self.twice(self.linears[1](x))
        x = self.twice(self.linears[2](x))
        return self.linears[4](self.linears[3](x).relu())


def test_every_spelling_counts_and_constants_do_not() -> None:
    model = Functional().requires_grad_(requires_grad=False)
    calls = piecewise._calls(Network(model, [gaussian()]))
    assert [call.module for call in calls] == ["", "twice", "twice", ""]
    x = gaussian()
    for i in range(4):
        same = propagate(model, x, cp.PiecewiseLinear(i - 4))
        assert_same(propagate(model, x, cp.PiecewiseLinear(i)), same)
    with pytest.raises(cp.UnsupportedOperation, match="2 calls of ReLU are in a module 'twice'"):
        propagate(model, x, cp.PiecewiseLinear("twice"))


def test_in_place_and_dtype_and_images() -> None:
    plain, changing = network(4, 6, 5, 3), network(4, 6, 5, 3, inplace=True)
    x = gaussian(2)
    assert_same(propagate(changing, x, PL), propagate(plain, x, PL))
    narrow = propagate(plain.float(), x.to(torch.float32), PL)
    assert narrow.dtype == torch.float32
    assert_same(narrow.to(D), propagate(plain.to(D), x, PL), 1e-5)
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 2, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8, 3),
    ).to(D)  # fmt: skip
    image = cp.Gaussian.isotropic(
        torch.linspace(-1, 1, 16, dtype=D).reshape(1, 1, 4, 4), stddev=0.01, batch_dims=1
    )
    with torch.no_grad():
        for layer in (0, "3"):
            found = propagate(cnn, image, cp.PiecewiseLinear(layer))
            assert_same(found, propagate(cnn, image), 1e-4)
            assert float(found.variance.min()) > 1e-7


def test_a_gradient_reaches_the_weights() -> None:
    model, x = network(4, 5, 4, 2), gaussian()
    weight = model[2].weight.clone().requires_grad_()

    def result(weight: Tensor) -> tuple[Tensor, Tensor]:
        def call(t: Any) -> Any:
            return model[3:](F.linear(torch.relu(model[0](t)), weight, model[2].bias))

        y = propagate(call, x, PL)
        return y.mean, y.covariance_matrix

    assert torch.autograd.gradcheck(result, (weight,))


def test_a_network_without_relu_is_refused() -> None:
    for model in (
        nn.Linear(4, 2).to(D),
        torch.tanh,
        F.leaky_relu,
        lambda x: torch.relu(weight()) * x,
    ):
        with pytest.raises(cp.UnsupportedOperation, match="this network has none"):
            propagate(model, gaussian(), PL)


def weight() -> Tensor:
    return torch.ones(4, dtype=D)


@pytest.mark.parametrize("layer", [2, -3])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(
        cp.UnsupportedOperation, match=f"no ReLU number {layer}: the network calls 2"
    ):
        propagate(network(4, 6, 5, 3), gaussian(), cp.PiecewiseLinear(layer))
    with pytest.raises(cp.UnsupportedOperation, match="in '1', '3', in this order"):
        propagate(network(4, 6, 5, 3), gaussian(), cp.PiecewiseLinear("9"))
    with pytest.raises(ValueError, match="a number or the name of a module"):
        cp.PiecewiseLinear(1.5)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x + torch.relu(x),
        lambda x: (torch.relu(x), 2 * x),
        lambda x: torch.relu(x) + torch.relu(-x),
        lambda x: (torch.relu(x[..., :2]), torch.relu(x[..., 2:])),
    ],
)
def test_what_goes_past_the_relu_is_refused(model: Any) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="something goes past this one"):
        propagate(model, gaussian(), PL)


def test_a_result_changed_in_place_and_then_left_is_refused() -> None:
    def model(x: Any) -> Any:
        y = 2 * x
        y.relu_()
        return 3 * y

    with pytest.raises(cp.UnsupportedOperation, match="something goes past this one"):
        propagate(model, gaussian(), PL)


@pytest.mark.parametrize("stddev", [0.0, 1.0])
def test_scripts_cannot_be_looked_into(stddev: float) -> None:
    first, last = (nn.Linear(4, 4).to(D).requires_grad_(requires_grad=False) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.trace(nn.Sequential(first, nn.ReLU(), last), torch.zeros(4, dtype=D))
    x = cp.Gaussian.isotropic(torch.ones(4, dtype=D), stddev=stddev)
    for model in (script, nn.Sequential(script, nn.ReLU(), last)):
        with pytest.raises(cp.UnsupportedOperation, match="cannot look into all of this model"):
            propagate(model, x, cp.PiecewiseLinear())


@pytest.mark.parametrize("inplace", [False, True])
def test_it_finds_the_relus_of_an_exported_program(inplace: bool) -> None:
    model, x = network(4, 9, 8, 4, 2, inplace=inplace), gaussian()
    program = torch.export.export(model, (x.mean,)).module()
    assert_same(propagate(program, x, PL), propagate(model, x, PL), 1e-12)
