"""What a reviewer broke once: wide inputs, wrong slots, overflow, second derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.activations.moments import hermite_basis
from covprop.covariance import Dense
from covprop.covariance.base import without_negative_variances
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64


def gaussian(size: int = 3, dtype: torch.dtype = D) -> cp.Gaussian:
    factor = torch.randn(size, size, dtype=D, generator=torch.Generator().manual_seed(0))
    mean = torch.linspace(-1, 1, size, dtype=D)
    return cp.Gaussian(mean.to(dtype), (factor @ factor.mT).to(dtype))


def trapezoid(function, mean: float, stddev: float) -> tuple[float, float]:
    """Mean and variance on a grid that resolves both the function and the density."""
    near = torch.linspace(-60, 60, 600_001, dtype=D)
    far = 12 * stddev * torch.linspace(-1, 1, 600_001, dtype=D)
    y = torch.cat([near, far]).sort().values
    density = torch.exp(-(((y - mean) / stddev) ** 2) / 2) / (stddev * math.sqrt(2 * math.pi))
    value = function(y)
    first = torch.trapezoid(value * density, y)
    return float(first), float(torch.trapezoid((value - first) ** 2 * density, y))


@pytest.mark.parametrize("stddev", [9.0, 300.0, 1e4])
@pytest.mark.parametrize("function", [torch.tanh, F.silu, F.softsign, F.elu, F.hardswish])
def test_wide_elements_have_accurate_moments(function, stddev):
    y = propagate(function, cp.Gaussian.isotropic(torch.tensor([0.7], dtype=D), stddev=stddev))
    mean, variance = trapezoid(function, 0.7, stddev)
    assert float(y.mean) == pytest.approx(mean, abs=1e-6 * math.sqrt(variance))
    assert float(y.variance) == pytest.approx(variance, rel=1e-6)


def test_one_wide_element_does_not_burden_the_others():
    variance = torch.ones(256, dtype=D)
    variance[0] = 1e16
    hermite_basis.cache_clear()
    y = propagate(torch.tanh, cp.Gaussian.diagonal(torch.zeros(256, dtype=D), variance=variance))
    assert float(y.variance[0]) == pytest.approx(1, abs=1e-6)
    assert hermite_basis.cache_info().currsize <= 2  # no basis for the wide grid


def test_a_wide_layer_is_close_to_a_hard_one():
    x = gaussian(6)
    wide = cp.Gaussian(1e4 * x.mean, 1e8 * x.covariance_matrix)
    soft, hard = propagate(torch.tanh, wide), propagate(torch.sign, wide)
    assert_close(soft.covariance_matrix, hard.covariance_matrix, rtol=0.0, atol=1e-3)


def test_a_gaussian_bias_is_refused():
    with pytest.raises(cp.UnsupportedOperation, match="not for a Gaussian bias"):
        propagate(lambda b: F.linear(torch.ones(1, 2).double(), torch.ones(3, 2).double(), b),
                     gaussian())  # fmt: skip


def test_a_constant_in_the_shape_of_a_gaussian_stays_a_constant():
    constant = torch.tensor([1.0, 2.0, 0.0], dtype=D)
    assert torch.equal(propagate(lambda x: constant.expand_as(x), gaussian()), constant)
    y = propagate(lambda x: x + constant.expand_as(x), gaussian())
    assert_close(y.mean, gaussian().mean + constant)


def test_denormal_weights_do_not_look_like_a_mixed_batch():
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = 1e-41
        y = propagate(layer, cp.Gaussian.isotropic(torch.randn(2, 4), stddev=0.1, batch_dims=1))
    assert float(y.variance[0, 1]) == 0


@pytest.mark.parametrize("function", [torch.exp, lambda x: x**5])
def test_large_moments_stay_finite_off_the_diagonal(function):
    level = 43.0 if function is torch.exp else 1e4
    covariance = 1e-6 * (torch.eye(3) + 0.5)
    y = propagate(function, cp.Gaussian(torch.full((3,), level), covariance))
    expected = propagate(function, cp.Gaussian(torch.full((3,), level).double(),
                                                  covariance.double()))  # fmt: skip
    assert_close(y.covariance_matrix.double(), expected.covariance_matrix, rtol=1e-4)


def test_moments_that_overflow_are_refused():
    with pytest.raises(cp.MomentOverflow, match=r"overflow torch\.float32"):
        propagate(torch.exp, cp.Gaussian.isotropic(torch.zeros(2), stddev=20.0))


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=3)])
def test_second_derivatives_are_right_or_refused(method):
    def variance(mean: Tensor, function) -> Tensor:
        x = cp.Gaussian(mean, gaussian().covariance_matrix, validate_args=False)
        return propagate(lambda x: function(torch.exp(0.3 * x)), x, method).variance.sum()

    mean = gaussian().mean.requires_grad_()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.functional.hessian(lambda m: variance(m, torch.tanh), mean)


def test_learnable_parameters_of_an_activation_are_refused_where_they_would_be_forgotten():
    slope = nn.Parameter(torch.tensor(1.5, dtype=D))
    swish = cp.activation(lambda x: x * torch.sigmoid(slope * x))
    with pytest.raises(cp.QuadratureError, match="parameters that require a gradient"):
        propagate(swish, gaussian())
    with torch.no_grad():
        assert bool((propagate(swish, gaussian()).variance > 0).all())


def test_validation_is_in_units_of_the_standard_deviations():
    tiny = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    cp.Gaussian(torch.zeros(2), 1e-24 * tiny)
    bad = torch.diag(torch.tensor([1e8, 1.0, 1.0], dtype=D))
    bad[1, 2] = bad[2, 1] = 2
    with pytest.raises(cp.InvalidGaussian, match="exceeds the product"):
        cp.Gaussian(torch.zeros(3, dtype=D), bad)
    bad[1, 2], bad[2, 1] = 0.5, 0.4
    with pytest.raises(cp.InvalidGaussian, match="not symmetric"):
        cp.Gaussian(torch.zeros(3, dtype=D), bad)


def test_what_rounding_of_the_largest_variance_explains_is_valid():
    """In float32 next to 1e8, numbers of order 1 are what rounding leaves of a product."""
    left = torch.diag(torch.tensor([1e8, 1.0, 1.0]))
    left[1, 2] = left[2, 1] = 2
    cp.Gaussian(torch.zeros(3), left)


def test_small_matrices_are_checked_exactly_in_any_batch():
    matrix = torch.full((40, 40), -0.05, dtype=D).fill_diagonal_(1)
    with pytest.raises(cp.InvalidGaussian, match="eigenvalue"):
        cp.Gaussian(torch.zeros(3000, 40, dtype=D), matrix.expand(3000, 40, 40))


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_a_structure_of_the_wrong_shape_is_refused(shape):
    with pytest.raises(cp.InvalidGaussian, match=r"shape \(\*batch, n, n\)"):
        cp.Gaussian(torch.zeros(3), Dense(torch.zeros(shape)))


def test_a_mask_may_not_reach_into_the_event():
    batch = cp.Gaussian.isotropic(torch.zeros(3, 3), stddev=1.0, batch_dims=1)
    with pytest.raises(IndexError, match="2 indices for a batch"):
        batch[torch.eye(3, dtype=torch.bool)]
    assert len(batch[torch.tensor([True, False, True])]) == 2


def test_a_replaced_activation_must_be_of_a_torch_function():
    with pytest.raises(ValueError, match="no torch function with a rule"):
        propagate(torch.sigmoid, gaussian(), cp.Series(activations={nn.Sigmoid: None}))
    paper = cp.Series(order=4, activations={torch.sigmoid: cp.DaunizeauSigmoid(math.pi / 8)})
    spread = 1 + math.pi / 8 * gaussian().variance
    expected = torch.sigmoid(gaussian().mean / spread.sqrt())
    assert_close(propagate(torch.sigmoid, gaussian(), paper).mean, expected)
    assert hash(paper) == hash(paper)


def test_an_infinite_bound_is_none():
    y = propagate(lambda x: x.clamp(-math.inf, 0.5), gaussian())
    z = propagate(lambda x: x.clamp(max=0.5), gaussian())
    assert_close(y.covariance_matrix, z.covariance_matrix)


@pytest.mark.parametrize("method", [cp.GaussianLayers(), cp.Linearized(), cp.MonteCarlo(64)])
def test_an_output_whose_variances_underflow_is_told(method):
    """As that of a MobileNet v2 of transformers with weights of a deviation of 0.02."""
    x = gaussian(4, torch.float32)
    x = cp.Gaussian(x.mean + 1, x.covariance_matrix)
    tiny = torch.full((4, 4), 1e-12)

    def shrinking(x):
        return (x @ tiny) @ tiny

    with pytest.warns(cp.ApproximationWarning, match="below the smallest numbers"):
        y = cp.propagate(shrinking, x, method)
    assert not y.variance.any()
    fine = cp.propagate(lambda x: torch.softmax(x * 1e-30, -1), x, method)  # without a warning
    assert bool((fine.mean > 0.2).all())


def test_rounding_of_the_smallest_numbers_is_no_contradiction():
    tiny = torch.finfo(torch.float32).smallest_normal
    matrix = torch.tensor([[-tiny / 2**20, 0.0], [0.0, tiny / 2**19]])
    kept = without_negative_variances(Dense(matrix), lambda: matrix.diagonal().abs())
    assert kept.diagonal().tolist() == [0.0, tiny / 2**19]
    with pytest.raises(cp.InconsistentBranches):
        without_negative_variances(Dense(1e9 * matrix), lambda: matrix.diagonal().abs())
