"""Norms that models write out, against the functions that torch has for them, and samples."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

EPS = 1e-5


def rms(x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def quotient(x: Any) -> Any:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def power(x: Any) -> Any:
    return x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).pow(-0.5)


def layer(x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def by_variance(x: Any) -> Any:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + EPS)


def masked(x: Any) -> Any:
    """As the scaler of PatchTST, with a mask of ones."""
    ones = torch.ones(x.shape, dtype=x.dtype)
    centred = x - x.sum(-1, keepdim=True) / ones.sum(-1, keepdim=True)
    variance = ((centred * ones) ** 2).sum(-1, keepdim=True) / ones.sum(-1, keepdim=True)
    return centred / torch.sqrt(variance + EPS)


def unit(x: Any) -> Any:
    return x / x.square().sum(-1, keepdim=True).sqrt()


WRITTEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "rms": (rms, lambda x: F.rms_norm(x, (3,), eps=EPS)),
    "quotient": (quotient, lambda x: F.rms_norm(x, (3,), eps=EPS)),
    "power": (power, lambda x: F.rms_norm(x, (3,), eps=EPS)),
    "layer": (layer, lambda x: F.layer_norm(x, (3,), eps=EPS)),
    "by variance": (by_variance, lambda x: F.layer_norm(x, (3,), eps=EPS)),
    "masked": (masked, lambda x: F.layer_norm(x, (3,), eps=EPS)),
    "unit": (unit, lambda x: F.normalize(x, dim=-1)),
    "of columns": (
        lambda x: x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + EPS),
        lambda x: F.rms_norm(x, (2, 3), eps=EPS),
    ),
}


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("scale", [1e-2, 1.0, 5.0])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_written_out_is_that_of_torch(
    name: str, batch: tuple[int, ...], scale: float
) -> None:
    written, function = WRITTEN[name]
    x = gaussian(2, 3, batch=batch)
    x = cp.Gaussian(x.mean, x.covariance_matrix * scale**2)
    y, z = propagate(written, x), propagate(function, x)
    # What is added to the square is an element more: the same integrals, with other rounding,
    # and differences of them that are 1e-4 of what they are made of (SMALL_NOISE).
    assert_close(y.mean, z.mean, atol=1e-10)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-9)


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_length_in_single_precision_is_that_of_its_tensor(batch: tuple[int, ...]) -> None:
    """As T5 writes its norm, whose dependence on the tensor in double precision stays."""

    def single(x: Any) -> Any:
        return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)

    x = gaussian(2, 3, batch=batch)
    y = propagate(lambda x: x + 0.5 * single(x), x)
    z = propagate(lambda x: x + 0.5 * F.rms_norm(x, (3,), eps=EPS), x)
    assert y.dtype == torch.float64
    assert_close(y.mean, z.mean, atol=1e-6)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-5)


def test_the_batch_may_be_anywhere() -> None:
    x = gaussian(2, 3, batch=(2,))
    y = propagate(lambda x: rms(x.movedim(0, 1)), x)
    assert_close(y.covariance_matrix, propagate(rms, x).covariance_matrix, atol=1e-14)


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sqrt(x.square().sum(-1) + 0.5),
        lambda x: torch.rsqrt(2 * x.square().sum(-1) + 0.5),
        lambda x: 1 / torch.sqrt(x.square().mean(-1) + 0.5),
        lambda x: x.square().sum(-1).sqrt(),
        lambda x: (r := torch.rsqrt(x.square().sum(-1) + 0.5)) + (r[..., None] * x).sum(-1),
    ],
)
def test_roots_of_one_group_agree_with_samples(function: Callable[[Any], Any]) -> None:
    x = gaussian(3)

    def with_input(x: Any) -> Any:
        return torch.cat([function(x)[..., None], x], -1)

    y = propagate(with_input, x)
    sample = with_input(x.sample(200_000, torch.Generator().manual_seed(0)))
    centred = sample - sample.mean(0)
    products = centred[:, :, None] * centred[:, None, :]
    count = len(sample) ** 0.5
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * sample.std(0) / count).all())
    off = (y.covariance_matrix - products.mean(0)).abs()
    assert bool((off <= 5 * products.std(0) / count).all())


@pytest.mark.filterwarnings("ignore:more than 10%")
@pytest.mark.parametrize(
    "scaled", [lambda r: r, lambda r: 2 * r, lambda r: r.expand(3), lambda r: r.flip(0)]
)
def test_a_tensor_times_the_inverse_length_of_another_is_told(scaled: Callable[[Any], Any]) -> None:
    x = gaussian(3)

    def product(x: Any) -> Any:
        return x.flip(-1) * scaled(torch.rsqrt(x.square().mean(-1, True) + EPS))

    with pytest.warns(cp.ApproximationWarning, match="inverse length of another"):
        propagate(product, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = cp.Gaussian(x.mean, x.covariance_matrix / 1e6)
        propagate(product, near)


def test_gradients_are_those_of_the_function_of_torch() -> None:
    mean, factor = gaussian(3).mean, torch.eye(3, dtype=torch.float64)

    def gradients(function: Callable[[Any], Any]) -> list[Tensor]:
        given = [mean.clone().requires_grad_(), (0.5 * factor).requires_grad_()]
        y = propagate(function, cp.Gaussian(given[0], given[1] @ given[1].mT))
        (y.mean.sum() + y.covariance_matrix.square().sum()).backward()
        return [value.grad for value in given if value.grad is not None]

    for written, expected in zip(gradients(rms), gradients(WRITTEN["rms"][1]), strict=True):
        assert_close(written, expected, atol=1e-8)
