"""Recurrent networks and attention against torch at no noise and sampling at small noise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from tests.oracles import assert_close

D = torch.float64
SAMPLES = 200_000
torch.manual_seed(0)
CELL, GRU_CELL = nn.LSTMCell(3, 4).double(), nn.GRUCell(3, 4).double()
LSTM = nn.LSTM(3, 4, num_layers=2).double()
BOTH_WAYS = nn.LSTM(3, 3, bidirectional=True, bias=False, batch_first=True).double()
GRU = nn.GRU(3, 4).double()
WEIGHT = torch.randn(3, 3).double()
CASES = {  # the function of one sequence, its shape, and the same function of many samples at once
    "LSTMCell": (lambda x: CELL(x)[0], (1, 3), lambda s: CELL(s[:, 0])[0][:, None]),
    "GRUCell": (lambda x: GRU_CELL(x), (1, 3), lambda s: GRU_CELL(s[:, 0])[:, None]),
    "LSTM": (lambda x: LSTM(x)[0], (4, 3), lambda s: LSTM(s.transpose(0, 1))[0].transpose(0, 1)),
    "LSTM, last state": (
        lambda x: LSTM(x)[1][1],
        (4, 3),
        lambda s: LSTM(s.transpose(0, 1))[1][1].transpose(0, 1),
    ),
    "LSTM, both ways": (lambda x: BOTH_WAYS(x)[0], (4, 3), lambda s: BOTH_WAYS(s)[0]),
    "GRU": (lambda x: GRU(x)[0], (4, 3), lambda s: GRU(s.transpose(0, 1))[0].transpose(0, 1)),
    "attention": (
        attend := lambda x: F.scaled_dot_product_attention(x @ WEIGHT, x, x),
        (4, 3),
        attend,
    ),
    "causal": (
        causal := lambda x: F.scaled_dot_product_attention(x, x, x @ WEIGHT, is_causal=True),
        (4, 3),
        causal,
    ),
}


def gaussian(shape: tuple[int, ...], noise: float) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(1)
    return cp.Gaussian.isotropic(torch.randn(shape, dtype=D, generator=generator), noise)


@pytest.mark.parametrize("name", CASES)
def test_without_noise_the_mean_is_the_networks_output(name):
    function, shape, _ = CASES[name]
    with torch.no_grad():
        y = cp.propagate(function, gaussian(shape, 0.0))
        assert_close(y.mean, function(gaussian(shape, 0.0).mean))
    assert not bool(y.variance.any())


@pytest.mark.parametrize("name", CASES)
def test_small_noise_agrees_with_sampling(name):
    function, shape, of_many = CASES[name]
    x = gaussian(shape, 0.02)
    with torch.no_grad():
        y = cp.propagate(function, x)
        outputs = of_many(x.sample(SAMPLES, torch.Generator().manual_seed(2)))
    error = 5 / (2 * SAMPLES) ** 0.5 + 3e-3
    assert float((y.stddev / outputs.std(0) - 1).abs().max()) < error
    shift = ((y.mean - outputs.mean(0)) / y.stddev).abs().max()
    assert float(shift) < 5 / SAMPLES**0.5 + 5e-3


def test_a_batch_of_sequences_is_refused():
    x = cp.Gaussian.isotropic(torch.zeros(2, 4, 3, dtype=D), 0.1, batch_dims=1)
    with pytest.raises(cp.UnsupportedOperation, match="loop over the batch"):
        cp.propagate(BOTH_WAYS, x)
