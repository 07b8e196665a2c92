"""The covariance of a constant behind every door, against zeros written out."""

import pytest
import torch

import covprop as cp
from covprop.covariance import Dense, Diagonal, LinearMap, Zero
from tests.oracles import assert_close

BATCHES = [(), (2,), (2, 3)]


@pytest.mark.parametrize("batch", BATCHES)
def test_every_door_gives_zeros_of_the_right_shape(batch: tuple[int, ...]) -> None:
    zero = Zero.like(torch.ones(*batch, 2, 3), len(batch))
    full = Dense(torch.zeros(*batch, 6, 6))
    linear = LinearMap(lambda x: x[..., :1, :].flatten(-2), torch.Size((2, 3)), leading=True)
    index = torch.tensor([0, 0, 5])
    assert zero.batch_shape == batch
    for one, other in (
        (zero, full),
        (zero.push(linear), full.push(linear)),
        (zero.take(index), full.take(index)),
        (zero.scale(torch.ones(6)), full),
        (zero.pairwise(lambda *_: torch.ones(()), (), torch.zeros(*batch, 6)), full),
        (zero.map(lambda t: t.double()), full.map(lambda t: t.double())),
    ):
        assert one.size == other.size
        assert_close(one.diagonal(), other.diagonal())
        assert_close(one.matrix(), other.matrix())
    assert zero.largest(lambda *_: torch.ones(()), ()) == 0
    assert not zero.noise(4, None).any()
    assert zero.noise(4, None).shape == (4, *batch, 6)


def test_a_constant_goes_through_a_network_as_itself() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.GELU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 2), torch.nn.Softmax(-1),
    ).double()  # fmt: skip
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    for method in (cp.Exact(), cp.Series(), cp.AssumedDensity(), cp.Linearized(), cp.MonteCarlo(4)):
        y = cp.propagate(model, cp.Gaussian.constant(x, batch_dims=1), method)
        assert_close(y.mean, model(x))
        assert not y.variance.any()


def test_dropout_makes_a_constant_vary() -> None:
    x = torch.full((2, 4), 3.0)
    y = cp.propagate(torch.nn.Dropout(0.5), cp.Gaussian.constant(x, batch_dims=1))
    assert isinstance(y.covariance, Diagonal)
    assert_close(y.variance, torch.full((2, 4), 9.0))


def test_a_constant_has_to_be_a_number() -> None:
    with pytest.raises(cp.InvalidGaussian, match="NaN or infinite"):
        cp.Gaussian.constant(torch.tensor([1.0, torch.inf]))
    with pytest.raises(cp.InvalidGaussian, match="float32 or float64"):
        cp.Gaussian.constant(torch.tensor([1]))
