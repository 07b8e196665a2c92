"""A model as a function of tensors: what depends on the inputs, and where its batch is."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods import Network
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import gaussian

D = torch.float64


def into_a_buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros(4, dtype=D)
    buffer[:2] = x[:2]
    return buffer


def into_a_view_of_a_buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros(2, 4, dtype=D)
    buffer[0].copy_(0 * x)
    return buffer


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # Its check imports torch.distributed.tensor.
        return torch.jit.trace(nn.Linear(4, 2).to(D), torch.zeros(4, dtype=D), check_trace=False)


@pytest.mark.parametrize(
    "model",
    [
        torch.sign, into_a_buffer, into_a_view_of_a_buffer, lambda x: torch.relu(x - 1e9),
        lambda x: torch.zeros(4, dtype=D).add_(0 * x), lambda x: x.detach() * 0,
        lambda x: torch.stack([x, x])[0, :1], lambda x: x.chunk(2)[1], scripted(),
    ],
)  # fmt: skip
def test_results_that_depend_on_the_input_are_outputs(model: Any) -> None:
    assert len(Network(model, [gaussian()]).outputs) == 1


@pytest.mark.parametrize(
    "model",
    [
        torch.zeros_like, lambda _: torch.ones(3, dtype=D) * 2, lambda x: x.new_ones(4) + 1,
        lambda x: torch.arange(x.shape[0]), lambda _: None,
    ],
)  # fmt: skip
def test_results_that_do_not_are_none(model: Any) -> None:
    assert Network(model, [gaussian()]).outputs == ()


@pytest.mark.parametrize(
    ("model", "at", "event"),
    [
        (lambda x: x, 0, (3,)),
        (lambda x: x.transpose(0, 1), 1, (3,)),
        (lambda x: x[None].expand(3, 3, 3).movedim(1, 2) + x.sum(1), 2, (3, 3)),
        (lambda x: torch.relu(x - 1e9), 0, (3,)),  # nothing changes but what is NaN
        (lambda x: torch.relu(x - 1e9).mT, 1, (3,)),
        (lambda x: torch.relu(x).mT, 1, (3,)),
        (lambda x: torch.where(x > 0, x, 0).mT, 1, (3,)),
        (lambda x: torch.diag_embed(x.sum(1)), 0, (3,)),  # apart along both: the first
    ],
)
def test_the_batch_is_found_where_its_elements_stay_apart(
    model: Any, at: int, event: tuple[int, ...]
) -> None:
    (output,) = Network(model, [gaussian(3, size=3)]).outputs
    assert (output.batch_at, tuple(output.event_shape)) == (at, event)


@pytest.mark.parametrize("model", [lambda x: 2 * x.mT, lambda x: torch.relu(x).mT])
def test_the_batch_is_found_though_its_first_element_does_not_change(model: Any) -> None:
    mean = torch.arange(9, dtype=D).reshape(3, 3) - 2
    some = torch.zeros(3, 3, dtype=D)
    some[0, 0] = 1  # also where one number of the first element alone may change
    for variance in (torch.zeros(3, 3, dtype=D), some):
        variance[1:] = 1
        x = cp.Gaussian.diagonal(mean, variance=variance, batch_dims=1)
        y = propagate(model, x, cp.Linearized())
        assert_close(y.mean, model(mean).mT, atol=0)
        assert bool((y.variance[0] <= 4 * variance[0]).all())


def test_elements_that_mix_are_found_though_the_first_is_certain() -> None:
    variance = torch.tensor([[0.0], [1], [1]], dtype=D).expand(3, 4)
    x = cp.Gaussian.diagonal(torch.ones(3, 4, dtype=D), variance=variance, batch_dims=1)
    with pytest.raises(cp.BatchDimensionError, match="are mixed"):
        Network(lambda x: x - x.mean(0), [x])


def test_a_batch_that_could_be_anywhere_is_refused() -> None:
    with pytest.raises(cp.BatchDimensionError, match="ambiguous which dimension is the batch"):
        Network(lambda x: (x > 1e9).to(D), [gaussian(3, size=3)])


def test_a_model_that_does_not_bear_another_input_is_looked_at_where_it_does() -> None:
    def model(x: Tensor) -> Tensor:
        assert bool((x.abs() < 10).all())
        return torch.relu(x - 1e9).mT

    with pytest.raises(cp.BatchDimensionError, match="ambiguous"):
        Network(model, [gaussian(3, size=3)])
    assert Network(model, [gaussian(3, size=4)]).outputs[0].batch_at == 1


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_certain_input_of_a_script_has_a_certain_output(batch: tuple[int, ...]) -> None:
    x = cp.Gaussian.isotropic(torch.ones(*batch, 4, dtype=D), stddev=0.0, batch_dims=len(batch))
    network = Network(scripted(), [x])
    assert len(network.outputs) == 1
    assert not network.visible
    assert isinstance(propagate(scripted(), x, cp.Linearized()), cp.Gaussian)


def test_points_are_evaluated_as_the_model_would_one_by_one() -> None:
    x = gaussian(2)

    def model(x: Tensor) -> Any:
        return x.view(x.size(0), -1).tanh(), {"sum": x.sum(1)}

    points = torch.randn(5, 2, 4, dtype=D, generator=torch.Generator().manual_seed(0))
    network = Network(model, [x])
    first, second = network.at([points])
    assert_close(first, torch.stack([model(point)[0] for point in points]), atol=1e-15)
    assert_close(second[..., 0], points.sum(-1), atol=1e-15)
    assert network._vectorised


def test_the_largest_tensor_on_the_way_bounds_the_bundle() -> None:
    network = Network(lambda x: x.repeat(3000).relu().sum(), [gaussian()])
    assert network.largest == 12_000
    assert network.step == 2**20 // 12_000


def test_randomness_is_noticed_and_taken_back() -> None:
    state = torch.get_rng_state()
    assert Network(lambda x: x + torch.randn(4, dtype=D), [gaussian()]).draws
    assert not Network(torch.tanh, [gaussian()]).draws
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", [cp.Linearized(), cp.Unscented(), cp.MonteCarlo(4)], ids=repr)
def test_an_empty_batch_has_an_empty_result(method: Any) -> None:
    x = cp.Gaussian.isotropic(torch.zeros(0, 4, dtype=D), stddev=1.0, batch_dims=1)
    y = propagate(nn.Linear(4, 3).to(D), x, method)
    assert y.mean.shape == (0, 3)
    assert y.covariance_matrix.shape == (0, 3, 3)


class Steps(nn.Module):
    """A recurrent layer, which vmap cannot do."""

    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.lstm, self.by_size = nn.LSTM(3, 2, batch_first=True), by_size

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1] * (len(x) if self.by_size else 1)


@pytest.mark.parametrize("by_size", [False, True])
def test_what_vmap_cannot_do_runs_in_one_batch_where_it_may(by_size: bool) -> None:
    """Not where the size of the batch changes the values."""
    torch.manual_seed(0)
    model = Steps(by_size).double().requires_grad_(requires_grad=False)
    x = cp.Gaussian.isotropic(torch.randn(2, 4, 3, dtype=D), stddev=0.3, batch_dims=1)
    network = Network(model, [x])
    assert network.vectorised is not by_size
    points = torch.randn(5, 2, 4, 3, dtype=D)
    (found,) = network.at([points])
    assert_close(found, torch.stack([model(point) for point in points]))
