"""PL-DNN of 2018 and of 2020: the same where the middle ReLU has mean zero."""

import pytest
import torch
from torch import nn

import covprop as cp
from experiments import table1
from experiments.bibi2018 import any_mean, rectifiers, zero_mean
from tests.oracles import assert_close


def network(offset: float) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    model = model.double().requires_grad_(False)
    inner = model[:3](torch.zeros(4, dtype=torch.float64))
    model[2].bias += offset - inner  # what the middle ReLU gets at the mean
    return model


def moments(model: nn.Sequential) -> tuple[cp.Gaussian, cp.Gaussian]:
    factor = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).cos()
    x = cp.Gaussian(torch.zeros(4, dtype=torch.float64), factor @ factor.mT / 10)
    return zero_mean(model, x), any_mean(model, x)


def test_the_middle_relu_is_taken():
    for name, middle in {"FC-4": 3, "FC-8": 7, "CNN-4": 3, "CNN-8": 7}.items():
        places = rectifiers(table1.NETWORKS[name][0]())
        assert places[len(places) // 2] == middle  # as many layers with weights before as after


def test_they_agree_at_a_mean_of_zero():
    # The rest is linearised at a kink, on the same side by both.
    old, new = moments(network(0.0))
    assert_close(old.mean, new.mean)
    assert_close(old.covariance_matrix, new.covariance_matrix)


@pytest.mark.parametrize("offset", [-0.3, 0.5])
def test_elsewhere_the_means_alone_agree(offset):
    old, new = moments(network(offset))
    assert_close(old.mean, new.mean)
    ratio = old.variance / new.variance
    assert bool((ratio > 1.5).all() if offset < 0 else (ratio < 0.8).all())
