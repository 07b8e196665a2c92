"""A constant goes through networks as itself; its doors are in `test_structures`."""

import pytest
import torch

import covprop as cp
from covprop.covariance import Diagonal
from tests.layers import propagate
from tests.oracles import assert_close


def test_a_constant_goes_through_a_network_as_itself() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.GELU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 2), torch.nn.Softmax(-1),
    ).double()  # fmt: skip
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    for method in (cp.Exact(), cp.Series(), cp.AssumedDensity(), cp.Linearized(), cp.MonteCarlo(4)):
        y = propagate(model, cp.Gaussian.constant(x, batch_dims=1), method)
        assert_close(y.mean, model(x))
        assert not y.variance.any()


def test_dropout_makes_a_constant_vary() -> None:
    x = torch.full((2, 4), 3.0)
    y = propagate(torch.nn.Dropout(0.5), cp.Gaussian.constant(x, batch_dims=1))
    assert isinstance(y.covariance, Diagonal)
    assert_close(y.variance, torch.full((2, 4), 9.0))


def test_a_constant_has_to_be_a_number() -> None:
    with pytest.raises(cp.InvalidGaussian, match="NaN or infinite"):
        cp.Gaussian.constant(torch.tensor([1.0, torch.inf]))
    with pytest.raises(cp.InvalidGaussian, match="float32 or float64"):
        cp.Gaussian.constant(torch.tensor([1]))
