"""The methods of tables 1 and 2."""

import pytest
import torch

import covprop as cp
from experiments import ratio_methods, table1
from experiments.options import Options
from tests.layers import propagate
from tests.oracles import assert_close


@pytest.mark.parametrize("network", table1.NETWORKS)
@torch.no_grad()
def test_pl_dnn_splits_a_network_in_the_middle(network):
    """As many layers with weights before the ReLU as after."""
    model, x = table1.instance(f"{network}/published/0", Options(smoke=True))
    weighted = [place for place, layer in enumerate(model) if hasattr(layer, "weight")]
    place = weighted[len(weighted) // 2] - 1
    expected = propagate(model, x, cp.PiecewiseLinear(str(place)))
    found = ratio_methods.METHODS[ratio_methods.PIECEWISE](model, x)
    assert_close(found.covariance_matrix, expected.covariance_matrix)


@torch.no_grad()
def test_a_result_has_every_method_and_the_errors_of_sampling():
    model, x = table1.instance("FC-4/text/0", Options(smoke=True))
    result = ratio_methods.measured(model, x, 2000, "seed", covariance=True)
    assert list(result) == [ratio_methods.SAMPLED, *ratio_methods.METHODS]
    assert result[ratio_methods.EXACT]["covariance"] == result[ratio_methods.EXACT]["variance"]
    error = (
        result[ratio_methods.SAMPLED]["variance stderr"][0]
        / result[ratio_methods.SAMPLED]["variance"][0]
    )
    assert error == pytest.approx((2 / 2000) ** 0.5, rel=0.3)
    again = ratio_methods.measured(model, x, 2000, "seed")
    assert again[ratio_methods.SAMPLED]["mean"] == result[ratio_methods.SAMPLED]["mean"]
