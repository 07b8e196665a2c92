"""The unscented transform: its points, its weights and what it is exact for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import assert_same, gaussian

D = torch.float64
SETTINGS = [
    cp.Unscented(), cp.Unscented(beta=2.0), cp.Unscented(kappa=-1.0),
    cp.Unscented(alpha=0.5, beta=2.0, kappa=1.0),
]  # fmt: skip
every = pytest.mark.parametrize("method", SETTINGS, ids=repr)


def quadratic(x: Any) -> Any:
    a = torch.linspace(-1, 1, 16, dtype=x.dtype).reshape(4, 4)
    return torch.stack([(x @ a * x).sum(-1), x.square().sum(-1), x[..., 0] * x[..., 1]], -1)


@every
@pytest.mark.parametrize("rank", [1, 4])
def test_the_mean_of_a_quadratic_function_is_exact(method: cp.Unscented, rank: int) -> None:
    x = gaussian(2, rank=rank)
    second = x.covariance_matrix + x.mean[..., :, None] * x.mean[..., None, :]
    a = torch.linspace(-1, 1, 16, dtype=D).reshape(4, 4)
    want = torch.stack(
        [(second * a).sum((-2, -1)), second.diagonal(dim1=-2, dim2=-1).sum(-1), second[..., 0, 1]],
        -1,
    )
    assert_close(propagate(quadratic, x, method).mean, want, atol=1e-12)


def transform(model: Any, x: cp.Gaussian, method: cp.Unscented) -> tuple[Tensor, Tensor]:
    """The textbook: 2 n + 1 points and two sets of weights, one after another."""
    n = len(x.mean)
    scale = method.alpha**2 * (n + method.kappa) - n
    factor = torch.linalg.cholesky((n + scale) * x.covariance_matrix)
    points = [x.mean, *(x.mean + factor[:, i] for i in range(n))]
    points += [x.mean - factor[:, i] for i in range(n)]
    weights = [scale / (n + scale)] + [1 / (2 * (n + scale))] * (2 * n)
    values = [model(point) for point in points]
    mean = sum(w * y for w, y in zip(weights, values, strict=True))
    weights[0] += 1 - method.alpha**2 + method.beta
    outer = [torch.outer(y - mean, y - mean) for y in values]
    return mean, sum(w * o for w, o in zip(weights, outer, strict=True))


@every
def test_it_is_the_textbook_transform(method: cp.Unscented) -> None:
    for model in (quadratic, lambda x: torch.relu(x) + x.exp()):
        y = propagate(model, gaussian(), method)
        mean, covariance = transform(model, gaussian(), method)
        assert_close(y.mean, mean, atol=1e-12)
        assert_close(y.covariance_matrix, covariance, atol=1e-12)


def test_two_inputs_are_one_of_both() -> None:
    x = gaussian(2)
    y = cp.Gaussian.diagonal(x.mean + 1, variance=x.variance / 3, batch_dims=1)
    together = cp.Gaussian(
        torch.cat([x.mean, y.mean], -1),
        torch.stack([torch.block_diag(a, b) for a, b in
                     zip(x.covariance_matrix, y.covariance_matrix, strict=True)]),
    )  # fmt: skip

    def model(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).tanh()

    apart = propagate(model, x, y, cp.Unscented())
    assert_same(apart, propagate(lambda z: model(*z.chunk(2, -1)), together, cp.Unscented()), 1e-14)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(3)
    whole = propagate(quadratic, x, cp.Unscented())
    monkeypatch.setattr("covprop.methods.network.HELD", 100)
    assert_same(propagate(quadratic, x, cp.Unscented()), whole, 1e-12)


def test_the_variance_of_a_square_is_exact_with_beta_two() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(1, dtype=D), stddev=0.7)
    y = propagate(torch.square, x, cp.Unscented(beta=2.0))
    assert float(y.variance) == pytest.approx(2 * 0.7**4, rel=1e-12)


def test_default_weights_keep_the_covariance_semi_definite_and_julier_s_do_not() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(10, dtype=D), stddev=1.0)

    def model(x: Any) -> Any:
        return torch.stack([x.square().sum(-1), torch.relu(x).sum(-1)], -1)

    default = propagate(model, x, cp.Unscented())
    assert float(torch.linalg.eigvalsh(default.covariance_matrix)[0]) > -1e-12
    julier = propagate(model, x, cp.Unscented(alpha=1.0, kappa=-7.0))
    assert float(torch.linalg.eigvalsh(julier.covariance_matrix)[0]) < -1


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": math.nan}, {"beta": math.inf}])
def test_numbers_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="number"):
        cp.Unscented(**options)
    with pytest.raises(cp.UnsupportedOperation, match=r"n \+ kappa must be positive"):
        propagate(quadratic, gaussian(), cp.Unscented(kappa=-4.0))
