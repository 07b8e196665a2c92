"""Probabilistic backpropagation: moments by samples, updates by exact posteriors."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from experiments import pbp, table3, uci
from experiments.pbp import Network
from tests.oracles import assert_close


def network(hidden: tuple[int, ...], members: int = 2, inputs: int = 3) -> Network:
    return Network(inputs, hidden, members, torch.Generator().manual_seed(0))


def rows(members: int, count: int, inputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(members, count, inputs, dtype=torch.float64, generator=generator)
    return x, x[..., 0] - x[..., 1] / 2


@pytest.mark.parametrize("mean", [-40.0, -6.0, -0.5, 0.0, 0.5, 30.0])
def test_a_rectified_unit_has_its_moments(mean):
    first, second = (
        integrate.quad(
            lambda y, k=k: y**k * stats.norm.pdf(y, mean), 0, max(mean, 0) + 12, points=[1e-1],
            epsabs=0, epsrel=1e-12, limit=200,
        )[0]
        for k in (1, 2)
    )  # fmt: skip
    found = pbp.rectified(torch.tensor(mean).double(), torch.tensor(1.0).double())
    # 1 - hazard (hazard + ratio) cancels in the far tail: terms of mean^2, times the small share.
    slack = 16 * np.finfo(float).eps * mean**2
    assert float(found[0]) == pytest.approx(first, rel=1e-9 + slack, abs=1e-300)
    assert float(found[1]) == pytest.approx(second - first**2, rel=1e-6 + slack**0.5, abs=1e-12)


def test_one_hidden_layer_has_the_moments_of_samples():
    """Units are independent with known inputs, so that mean and variance are exact."""
    net, (x, _) = network((6,)), rows(2, 4)
    net.variances = [0.2 * v for v in net.variances]
    mean, variance = pbp.output(net.means, net.variances, x)
    generator, count = torch.Generator().manual_seed(2), 200_000
    for member in range(2):
        value = x[member].expand(count, 4, 3)
        for place, (m, v) in enumerate(zip(net.means, net.variances, strict=True)):
            noise = torch.randn((count, *m.shape[1:]), dtype=torch.float64, generator=generator)
            weights = m[member] + v[member].sqrt() * noise
            value = torch.cat([value.relu() if place else value, torch.ones(count, 4, 1)], -1)
            value = value @ weights.mT / value.shape[-1] ** 0.5
        sampled = value[..., 0]
        assert ((mean[member] - sampled.mean(0)).abs() < 5 * sampled.std(0) / count**0.5).all()
        squares = (sampled - sampled.mean(0)).square()
        assert ((variance[member] - squares.mean(0)).abs() < 5 * squares.std(0) / count**0.5).all()


def test_a_datum_of_a_linear_network_gives_the_marginals_of_the_exact_posterior():
    net, (x, y) = network(()), rows(2, 1)
    noise = pbp.RATE / (pbp.SHAPE - 1)
    before = [part[0].clone() for part in (net.means[0], net.variances[0])]
    net.see(x[:, 0], y[:, 0])
    for member in range(2):
        features = torch.cat([x[member, 0], torch.ones(1)]) / 2  # sqrt(3 + 1)
        precision = torch.diag(1 / before[1][0]) + torch.outer(features, features) / noise
        covariance = precision.inverse()
        prior = network(()).means[0][member, 0]
        mean = covariance @ (prior / before[1][0] + features * y[member, 0] / noise)
        assert_close(net.means[0][member, 0], mean)
        assert_close(net.variances[0][member, 0], covariance.diagonal())


def test_a_precision_has_the_mean_and_variance_of_its_posterior():
    """Where Z is known for every precision: a target of mean 0.3 and no other variance.

    There Z is a Student density, and the posterior of the precision is again a Gamma.
    """
    shape, rate, error = 6.0, 6.0, 0.3
    logs = (
        stats.t(2 * (shape + k), scale=(rate / (shape + k)) ** 0.5).logpdf(error) for k in range(3)
    )
    found = pbp.matched(np.array(shape), np.array(rate), *map(np.array, logs))
    assert found[0] == pytest.approx(shape + 1 / 2)
    assert found[1] == pytest.approx(rate + error**2 / 2)


def test_refining_without_data_changes_no_weight_that_has_its_prior():
    """The factor of a weight is all it has: the cavity has no precision, and is left alone."""
    net = network((4,))
    before = [part.clone() for part in (*net.means, *net.variances)]
    net.refine()
    for old, new in zip(before, (*net.means, *net.variances), strict=True):
        assert_close(new, old)


def test_factors_are_what_the_posterior_has_beside_the_data():
    net, (x, y) = network((4,)), rows(2, 30)
    for row in range(30):
        net.see(x[:, row], y[:, row])
    likelihood = 1 / pbp._flat(net.variances) - net._factors[0]
    net.refine()
    assert_close(
        torch.from_numpy(1 / pbp._flat(net.variances) - net._factors[0]),
        torch.from_numpy(likelihood), rtol=1e-9, atol=1e-9,
    )  # fmt: skip
    assert all((v > 0).all() for v in net.variances)


def test_training_learns_and_members_are_trained_alone():
    random = np.random.default_rng(0)
    table = random.normal(size=(2, 120, 4))
    table[..., -1] = np.maximum(table[..., 0], 0) + 0.05 * table[..., -1]
    data = uci.standardised(table[:, :90], table[:, 90:])
    scores = pbp.train(data, (10,), ("test",), epochs=10)
    assert (scores.rmse < 0.5 * data.scale).all()
    assert ((scores.coverage > 0.8) & (scores.coverage <= 1)).all()
    again = pbp.train(data, (10,), ("test",), epochs=10)
    assert torch.equal(scores.density, again.density)


def test_a_result_stands_beside_the_published_one():
    result = {
        "density": [-1.6, -1.7], "rmse": [1.0, 1.1], "coverage": [0.9, 1.0], "seconds": 9.0,
        "milliseconds of a step": 1.0,
    }  # fmt: skip
    (table,) = table3._of_pbp({"results": {"yacht/PBP/own": result}})
    assert table.rows == [
        ["yacht", "-1.65 ± 0.05", "-1.63 ± 0.02", "1.05 ± 0.05", "1.02 ± 0.05", "0.950", "9"]
    ]
    assert table3._of_pbp({"results": {}}) == []
    assert set(table3.PUBLISHED_PBP) == set(table3.SETS)
