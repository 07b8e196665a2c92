"""`cp.GaussianLayers` and its former name."""

import pickle

import torch

import covprop as cp
from covprop import methods
from tests.layers import propagate


def test_the_former_name_is_the_same_class() -> None:
    assert cp.Exact is cp.GaussianLayers is methods.Exact is methods.GaussianLayers
    assert pickle.loads(pickle.dumps(cp.Exact())) == cp.GaussianLayers()


def test_it_is_printed_as_what_it_is() -> None:
    x = cp.Gaussian(torch.zeros(2), torch.eye(2))
    assert repr(cp.Exact()).startswith("GaussianLayers(")
    assert repr(propagate(torch.relu, x, cp.Exact()).method).startswith("GaussianLayers(")
