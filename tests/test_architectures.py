"""Whole architectures: small noise against sampling, independence of branches shown wrong."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.carriers import Full
from tests.architectures import ARCHITECTURES
from tests.layers import propagate
from tests.oracles import assert_close
from tests.sampled import sampled

PRECISION = 1.6e-3
"""The standard error of a standard deviation at small noise; else a part of what is allowed."""
SMALL, MODERATE = 0.01, 0.3
"""Standard deviations of each input element, whose mean is standard normal."""


def given(name: str, noise: float) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(0)
    shape = (1, *ARCHITECTURES[name].shape)
    mean = torch.randn(shape, dtype=torch.float64, generator=generator)
    return cp.Gaussian.isotropic(mean, stddev=noise, batch_dims=1)


@cache
@torch.no_grad()
def result(name: str, noise: float) -> cp.Gaussian:
    return propagate(ARCHITECTURES[name].build(), given(name, noise))


@cache
def sampled_stddev(name: str, noise: float) -> Tensor:
    """Of every output."""
    precision = PRECISION if noise == SMALL else max(0.0025, MEASURED[name] / 16)
    model, x = copy.deepcopy(ARCHITECTURES[name].build()).float(), given(name, noise)
    return sampled(model, x.mean[0].float(), noise, precision, most=256_000).stddev


def worst_error(y: cp.Gaussian, expected: Tensor) -> float:
    """The largest relative error of a standard deviation."""
    assert y.mean.shape == (1, len(expected))
    return float((y.stddev[0] / expected - 1).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_small_noise_agrees_with_sampling_and_independent_branches_do_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding the variances where branches meet, as most libraries do, is wrong."""
    expected, plain = sampled_stddev(name, SMALL), Full.cross
    right = worst_error(result(name, SMALL), expected)
    assert right <= ARCHITECTURES[name].tolerance

    def independent(self: Full, other: Full) -> Tensor | None:
        return plain(self, other) if self is other else None

    monkeypatch.setattr(Full, "cross", independent)
    wrong = propagate(ARCHITECTURES[name].build(), given(name, SMALL))
    least = 0.08 if name == "gated MLP" else 0.10
    assert worst_error(wrong, expected) >= max(least, 10 * right)


MEASURED = {
    "ResNet, basic": 0.02, "ResNet, bottleneck": 0.12, "DenseNet": 0.01, "U-Net": 0.14,
    "VGG": 0.12, "MobileNet": 0.07, "Inception": 0.02, "gated MLP": 0.01, "ViT": 0.03, "LSTM": 0.02,
}  # fmt: skip
"""Errors at moderate noise: hidden units are no longer Gaussian. Rounded up."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_moderate_noise_has_its_measured_error(name: str) -> None:
    y = result(name, MODERATE)
    assert worst_error(y, sampled_stddev(name, MODERATE)) <= MEASURED[name]
    matrix = y.covariance_matrix[0]
    assert torch.equal(matrix, matrix.mT)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    assert float(eigenvalues.min()) >= -1e-9 * float(eigenvalues.max())


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_batch_is_each_of_its_elements(name: str) -> None:
    model, first = ARCHITECTURES[name].build(), given(name, MODERATE).mean
    x = cp.Gaussian.isotropic(torch.cat([first, 1 - first]), stddev=MODERATE, batch_dims=1)
    y = propagate(model, x)
    for i in range(2):
        one = propagate(model, x[i : i + 1]) if i else result(name, MODERATE)
        scale = float(one.covariance_matrix.abs().max())
        assert_close(y.mean[i], one.mean[0], atol=1e-11)
        assert_close(y.covariance_matrix[i], one.covariance_matrix[0], atol=1e-10 * scale)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_certain_input_gives_the_network_itself(name: str) -> None:
    model, x = ARCHITECTURES[name].build(), given(name, 0.0)
    before = copy.deepcopy(model.state_dict())
    y = propagate(model, x)
    assert_close(y.mean, model(x.mean), atol=1e-12)
    assert not y.covariance_matrix.any()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def linear(module: nn.Module) -> nn.Module:
    """The same network without its activations."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU | nn.SiLU):
            setattr(module, name, nn.Identity())
        else:
            linear(child)
    return module


@torch.no_grad()
@pytest.mark.parametrize("name", ["DenseNet", "U-Net", "Inception"])
def test_without_activations_it_is_exact_to_rounding(name: str) -> None:
    model, x = linear(ARCHITECTURES[name].build()), given(name, MODERATE)
    y = propagate(model, x)
    with torch.enable_grad():
        slope = torch.autograd.functional.jacobian(model, x.mean).reshape(y.mean.numel(), -1)
    expected = slope @ x.covariance_matrix[0] @ slope.mT
    scale = float(expected.abs().max())
    assert_close(y.covariance_matrix[0], expected, atol=1e-12 * scale)
