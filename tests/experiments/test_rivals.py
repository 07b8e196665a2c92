"""Every rival is exact where nothing is approximated, and has its paper's formula elsewhere."""

import importlib.util
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import covprop as cp
from experiments.rivals import OURS, RIVALS, WITHOUT_ROW, Refused, polynomial_chaos
from tests.architectures import ARCHITECTURES
from tests.oracles import assert_close

CENTRED = "Bibi 2018 (PL-DNN)"
PACKAGES = {"FastBNNs": "fastbnns", "cuTAGI, ReLU": "pytagi", "cuTAGI, MixtureReLU": "pytagi"}
EXACT_FOR_ONE_LAYER = (
    "Gast & Roth 2018 (ADF)", "Wu 2019 (DVI)", "Alfadly 2020 (PL-DNN)", "cuTAGI, MixtureReLU",
)  # fmt: skip
TANGENTS = ("Petersen 2024 (SDP)", "Petersen 2024, marginals", "cuTAGI, ReLU")
MEANS, STDDEVS = (-1.5, -0.2, 0.0, 0.4, 2.0), (0.5, 1.0, 2.0, 0.3, 1.5)
FLOAT32 = 64 * torch.finfo(torch.float32).eps
"""Of cuTAGI: some dozens of additions and an error function in float32, relative to the largest."""


def rival(name: str) -> cp.methods.Method | object:
    """A rival, where its package is installed."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    return {**OURS, **RIVALS}[name]


def layer_of_relus() -> nn.Sequential:
    """Behind the identity, since cuTAGI begins with a linear layer."""
    identity = nn.Linear(len(MEANS), len(MEANS), bias=False).double()
    identity.weight.data = torch.eye(len(MEANS)).double()
    return nn.Sequential(identity, nn.ReLU()).requires_grad_(requires_grad=False)


def relus() -> cp.Gaussian:
    mean, stddev = (torch.tensor(values, dtype=torch.float64) for values in (MEANS, STDDEVS))
    return cp.Gaussian.diagonal(mean[None], variance=stddev.square()[None], batch_dims=1)


def rectified(mean: float, stddev: float) -> tuple[float, float]:
    """Mean and variance of a rectified Gaussian by quadrature."""
    density = stats.norm(mean, stddev).pdf
    end = max(0.0, mean) + 12 * stddev
    first, second = (
        integrate.quad(lambda y, k=k: y**k * density(y), 0, end, epsabs=1e-13, limit=200)[0]
        for k in (1, 2)
    )
    return first, second - first**2


@pytest.mark.parametrize("name", [name for name in {**OURS, **RIVALS} if name != CENTRED])
def test_a_network_that_is_linear_over_the_input_is_exact(name: str) -> None:
    """All ReLUs are active, by ten deviations; one layer needs no covariance of units."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 3).double().requires_grad_(requires_grad=False)
    linear.bias += 10
    mean, variance = torch.randn(1, 4).double(), torch.rand(1, 4).double()
    x = cp.Gaussian.diagonal(mean, variance=variance, batch_dims=1)
    run = rival(name)
    y = run(nn.Sequential(linear, nn.ReLU()), x)
    expected = linear.weight * variance @ linear.weight.T
    if name.startswith(("Monte Carlo", "ControlVariate")):  # by their own standard errors
        assert ((y.mean - linear(mean)).abs() <= 6 * y.mean_stderr + 1e-12).all()
        error = (y.covariance_matrix - expected).abs()
        assert (error <= 6 * y.covariance_stderr + 1e-12).all()
        return
    single = name in PACKAGES
    assert_close(y.mean, linear(mean), rtol=FLOAT32 if single else 1e-10, atol=0)
    # cuTAGI subtracts the squared mean from a second moment in float32.
    cancelled = 4 * torch.finfo(torch.float32).eps * float(y.mean.square().max()) if single else 0
    assert_close(y.variance, expected.diagonal()[None], rtol=1e-7, atol=cancelled)
    if run.joint:
        assert_close(y.covariance_matrix[0], expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", EXACT_FOR_ONE_LAYER)
def test_one_layer_of_relus_has_the_moments_of_rectified_gaussians(name: str) -> None:
    y = rival(name)(layer_of_relus(), relus())
    pairs = [rectified(*pair) for pair in zip(MEANS, STDDEVS, strict=True)]
    expected = torch.tensor(pairs, dtype=torch.float64)
    tolerance = FLOAT32 if "cuTAGI" in name else 1e-10
    assert_close(y.mean[0], expected[:, 0], rtol=0, atol=4 * tolerance)
    assert_close(y.variance[0], expected[:, 1], rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize(
    "name", ["Petersen 2024 (SDP)", "Petersen 2024, marginals", "cuTAGI, ReLU"]
)
def test_a_tangent_keeps_active_units_alone(name: str) -> None:
    """Of a mean of exactly 0 there is no tangent; torch's derivative there is 0."""
    x = relus()
    y = rival(name)(layer_of_relus(), x)
    active = (x.mean > 0).double()
    assert_close(y.mean, active * x.mean, rtol=FLOAT32, atol=0)
    chosen = x.mean != 0
    assert_close(y.variance[chosen], (active * x.variance)[chosen], rtol=FLOAT32, atol=FLOAT32)


def test_fast_bnns_takes_three_points_of_each_unit() -> None:
    y = rival("FastBNNs")(nn.Sequential(nn.ReLU()), relus())
    weights, places = np.array([2 / 3, 1 / 6, 1 / 6]), np.array([0.0, -1.0, 1.0]) * math.sqrt(3)
    points = np.maximum(np.array(MEANS) + places[:, None] * np.array(STDDEVS), 0)
    mean = weights @ points
    assert_close(y.mean[0], torch.from_numpy(mean), rtol=1e-6, atol=1e-7)  # weights in float32
    variance = weights @ (points - mean) ** 2
    assert_close(y.variance[0], torch.from_numpy(variance), rtol=1e-6, atol=1e-7)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.identity, self.relu = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        return nn.functional.relu(self.identity(x), inplace=True) + self.relu(self.identity(x))


@torch.no_grad()
def test_fast_bnns_sees_no_function_in_place() -> None:
    x = relus()
    once = rival("FastBNNs")(nn.Sequential(nn.ReLU()), x)
    twice = rival("FastBNNs")(InPlace(), x)  # a sum of terms that it takes as independent
    assert_close(twice.mean, 2 * once.mean)
    assert_close(twice.variance, 2 * once.variance)
    assert_close(x.mean, relus().mean)


def test_pl_dnn_of_2018_has_the_closed_form_of_zero_means() -> None:
    correlation, deviations = 0.6, torch.tensor([0.5, 2.0], dtype=torch.float64)
    matrix = torch.tensor([[1, correlation], [correlation, 1]], dtype=torch.float64)
    scale = torch.outer(deviations, deviations)
    x = cp.Gaussian(torch.zeros(1, 2).double(), (matrix * scale)[None])
    y = RIVALS[CENTRED](nn.ReLU(), x)
    root, angle = math.sqrt(1 - correlation**2), math.asin(correlation)
    found = (root + correlation * angle - 1) / (2 * math.pi) + correlation / 4
    variance = (1 - 1 / math.pi) / 2
    unit = torch.tensor([[variance, found], [found, variance]], dtype=torch.float64)
    expected = unit * scale
    assert_close(y.covariance_matrix[0], expected, rtol=1e-12, atol=0)


@torch.no_grad()
def chained(seed: int = 0) -> tuple[nn.Sequential, cp.Gaussian]:
    """All layers that a chain may have, and correlated noise."""
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.SiLU(), nn.AvgPool2d(2),
        nn.Dropout(), nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip
    model = nn.Sequential(body, nn.Tanh()).double()
    model(3 + 2 * torch.randn(64, 1, 4, 4).double())  # statistics of batch norm
    factor = torch.randn(16, 16).double() / 10
    x = cp.Gaussian(torch.randn(1, 1, 4, 4).double(), (factor @ factor.T)[None])
    return model.eval().requires_grad_(requires_grad=False), x


def jacobian(model: nn.Module, mean: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(model, mean)
    return found.reshape(-1, mean.numel())


def test_sdp_of_a_network_is_its_jacobian() -> None:
    model, x = chained()
    y = RIVALS["Petersen 2024 (SDP)"](model, x)
    slope = jacobian(model, x.mean)
    assert_close(y.mean, model(x.mean), rtol=1e-12, atol=1e-12)
    assert_close(y.covariance_matrix[0], slope @ x.covariance_matrix[0] @ slope.T, rtol=1e-9)


def test_marginals_of_sdp_square_every_jacobian() -> None:
    model, x = chained()
    y = RIVALS["Petersen 2024, marginals"](model, x)
    mean, variance = x.mean, x.variance.flatten()
    for layer in [*model[0], model[1]]:
        variance = jacobian(layer, mean).square() @ variance
        mean = layer(mean)
    assert_close(y.variance[0], variance, rtol=1e-12, atol=0)


def test_polynomials_are_exact() -> None:
    """Of f = (x1 x2, x1^2 - x2) by hand, for x = (1 + z1, 2 + z1 + 2 z2)."""
    root = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    x = cp.Gaussian(torch.tensor([1.0, 2.0], dtype=torch.float64), root @ root.T)

    class Quadratic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = x.unbind(-1)
            return torch.stack([first * second, first.square() - second], -1)

    # x1 x2 = 2 + 3 z1 + 2 z2 + z1^2 + 2 z1 z2; x1^2 - x2 = -1 + z1 - 2 z2 + z1^2
    for degree in (2, 4):
        y = RIVALS[f"polynomial chaos, degree {degree}"](Quadratic(), x)
        assert_close(y.mean, torch.tensor([3.0, 0.0]).double(), rtol=0, atol=1e-11)
        expected = torch.tensor([[9.0 + 4 + 2 + 4, 3 - 4 + 2], [1.0, 1 + 4 + 2]]).double()
        assert_close(y.covariance_matrix, expected, rtol=1e-10, atol=1e-10)


def test_hermite_products_are_orthonormal() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    grid = torch.from_numpy(np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2))
    mass = torch.from_numpy(np.outer(weights, weights).reshape(-1) / weights.sum() ** 2)
    products = polynomial_chaos.hermite_products(grid, 5)
    assert products.shape[1] == math.comb(7, 2)
    gram = products.T @ (mass[:, None] * products)
    assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=1e-11)


def test_what_a_rival_has_no_formula_for_is_a_sentence() -> None:
    transformer, shape = ARCHITECTURES["ViT"].build(), ARCHITECTURES["ViT"].shape
    x = cp.Gaussian.isotropic(torch.zeros(1, *shape).double(), stddev=0.1, batch_dims=1)
    for name in ("Petersen 2024 (SDP)", "cuTAGI, ReLU", "polynomial chaos, degree 4"):
        with pytest.raises(Refused, match=r"ViT|directions"):
            RIVALS[name](transformer, x)
    with pytest.raises(Refused, match="MaxPool2d"):
        RIVALS["Petersen 2024 (SDP)"](nn.MaxPool2d(2), x)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_not_installed_is_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [PACKAGES[name], *(m for m in sys.modules if m.startswith(PACKAGES[name]))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Refused, match="pip install --no-deps"):
        RIVALS[name](layer_of_relus(), relus())


def test_methods_without_a_row_say_why() -> None:
    assert not WITHOUT_ROW.keys() & RIVALS.keys()
    assert all(WITHOUT_ROW.values())
