"""Joint Gaussians, marginals and conditioning against linear algebra."""

import pytest
import torch
from torch import nn

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import joint, propagate
from tests.oracles import assert_close

D = torch.float64


def test_the_joint_of_a_linear_map_is_that_of_linear_algebra():
    x, layer = gaussian(4), nn.Linear(4, 3).double()
    with torch.no_grad():
        both = joint(layer, x)
        stacked = torch.cat([torch.eye(4, dtype=D), layer.weight])
        assert_close(both.mean, torch.cat([x.mean, layer(x.mean)]))
        assert_close(both.covariance_matrix, stacked @ x.covariance_matrix @ stacked.mT)


def test_the_joint_of_an_activation_has_steins_covariance():
    x = gaussian(3)
    both = joint(torch.relu, x)
    slope = torch.special.ndtr(x.mean / x.stddev)
    assert_close(both.covariance_matrix[:3, 3:], x.covariance_matrix * slope)
    assert_close(both.covariance_matrix[3:, 3:], propagate(torch.relu, x).covariance_matrix)


def test_a_marginal_is_a_part():
    x = gaussian(5, batch=(2,))
    part = x.marginal([3, 0])
    assert_close(part.mean, x.mean[:, [3, 0]])
    assert_close(part.covariance_matrix, x.covariance_matrix[:, [3, 0]][:, :, [3, 0]])
    assert x.marginal(slice(1, 3)).event_shape == (2,)
    with pytest.raises(IndexError, match="named twice"):
        x.marginal([1, 1])


def test_conditioning_is_regression():
    x = gaussian(5)
    value = torch.tensor([0.3, -1.2], dtype=D)
    rest = x.condition([1, 4], value)
    precision = torch.linalg.inv(x.covariance_matrix)  # another route: blocks of the inverse
    hidden, seen = [0, 2, 3], [1, 4]
    inner = torch.linalg.inv(precision[hidden][:, hidden])
    shift = inner @ precision[hidden][:, seen] @ (value - x.mean[seen])
    assert_close(rest.covariance_matrix, inner)
    assert_close(rest.mean, x.mean[hidden] - shift)


def test_conditioning_with_noise_is_a_kalman_update_in_every_element_of_a_batch():
    x, layer = gaussian(3, batch=(4,)), nn.Linear(3, 2, bias=False).double()
    value = torch.randn(4, 2, dtype=D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        posterior = joint(layer, x).condition([3, 4], value, variance=0.1)
        observe = layer.weight
        for i in range(4):
            information = torch.linalg.inv(x.covariance_matrix[i]) + observe.mT @ observe / 0.1
            covariance = torch.linalg.inv(information)
            pull = (
                torch.linalg.solve(x.covariance_matrix[i], x.mean[i]) + observe.mT @ value[i] / 0.1
            )
            assert_close(posterior.covariance_matrix[i], covariance)
            assert_close(posterior.mean[i], covariance @ pull)


def test_an_observation_that_cannot_vary_tells_nothing():
    x = cp.Gaussian(torch.zeros(3, dtype=D), torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=D)))
    rest = x.condition([2], torch.zeros(1, dtype=D))
    assert_close(rest.covariance_matrix, torch.diag(torch.tensor([1.0, 2.0], dtype=D)))


def test_a_module_that_changes_its_input_in_place_has_the_joint_of_the_input() -> None:
    x, layer = gaussian(3), nn.Linear(3, 2).double().requires_grad_(requires_grad=False)
    both = joint(nn.Sequential(nn.ReLU(inplace=True), layer), x)
    expected = joint(nn.Sequential(nn.ReLU(), layer), x)
    assert_close(both.mean[:3], x.mean, rtol=0)
    assert_close(both.covariance_matrix, expected.covariance_matrix, atol=1e-14)


def test_the_joint_of_what_moves_the_batch_has_it_first() -> None:
    x = gaussian(3, batch=(2,))
    both = joint(lambda x: x.unsqueeze(0).transpose(0, 2), x)
    assert_close(both.mean, x.mean.repeat(1, 2), rtol=0)


def test_the_joint_of_several_outputs_is_refused() -> None:
    with pytest.raises(cp.UnsupportedOperation, match="picks one"):
        joint(lambda x: (x, x), gaussian(3))


def test_noise_of_an_observation_is_a_matrix_variances_or_one_variance() -> None:
    x, value = gaussian(4), torch.zeros(2, dtype=D)
    variances = torch.tensor([0.1, 0.7], dtype=D)
    by_vector = x.condition([0, 1], value, variance=variances)
    by_matrix = x.condition([0, 1], value, covariance=torch.diag(variances))
    assert_close(by_vector.covariance_matrix, by_matrix.covariance_matrix, atol=1e-14)
    same = x.condition([0, 1], value, variance=torch.tensor([0.3, 0.3], dtype=D))
    assert_close(x.condition([0, 1], value, variance=0.3).mean, same.mean, atol=1e-14)
    with pytest.raises(cp.InvalidGaussian, match="negative"):
        x.condition([0, 1], value, variance=-0.1)
